"""The method that ``nonblocking_dequeue`` adds."""

from __future__ import annotations

from typing import Any

from omni_fastpath.ledger import state_of

_counters = state_of("nonblocking_dequeue").counters


def get_output_nowait(self: Any) -> Any:
    """The next raw output (``EngineCoreOutputs``) of this stage replica, or None at once if there is none.

    Call it on the loop that owns ``outputs_queue``. The socket reader shares that loop, so None may mean "not read
    yet". A call that finds nothing starts the reader if it does not run.

    Raises:
        EngineDeadError: The engine died. Other exceptions that the socket reader queued are raised too, formatted by
            upstream.
    """
    if self.outputs_queue.empty():
        self._ensure_output_queue_task()
        return None
    _counters["dequeued"] += 1
    outputs = self.outputs_queue.get_nowait()
    if isinstance(outputs, Exception):
        raise self._format_exception(outputs) from None
    return outputs
