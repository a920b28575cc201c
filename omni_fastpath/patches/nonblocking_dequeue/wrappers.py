"""The method that ``nonblocking_dequeue`` adds."""

from __future__ import annotations

from typing import Any

from omni_fastpath.ledger import runtime

_runtime = runtime("nonblocking_dequeue")
_counters = _runtime.counters
_taking = _runtime.guard("taking a raw output")


def get_output_nowait(self: Any) -> Any:
    """The next raw output (``EngineCoreOutputs``) of this stage replica, or None at once if there is none.

    Call it on the loop that owns ``outputs_queue``. The socket reader shares that loop, so None may mean "not read
    yet". A call that finds nothing starts the reader if it does not run. An item that was taken from the queue is
    returned, or raised, whatever else fails.

    Raises:
        EngineDeadError: The engine died. Other exceptions that the socket reader queued are raised too, formatted by
            upstream.
    """
    queue, outputs = self.outputs_queue, None
    if queue.empty():
        self._ensure_output_queue_task()
    with _taking:
        if queue.empty():
            _counters["empty"] += 1
        else:
            outputs = queue.get_nowait()
            _counters["dequeued"] += not isinstance(outputs, Exception)
    if isinstance(outputs, Exception):
        raise self._format_exception(outputs) from None
    return outputs
