"""The method that ``nonblocking_dequeue`` adds, and the trial of one that upstream may have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from omni_fastpath.ledger import runtime

_counters = runtime("nonblocking_dequeue").counters


def get_output_nowait(self: Any) -> Any:
    """The next raw output (``EngineCoreOutputs``) of this stage replica, or None at once when there is none.

    Call it on the loop that owns ``outputs_queue``. The socket reader shares that loop, so None may mean "not read
    yet". The first call starts the reader, as ``get_output_async`` does.

    Raises:
        EngineDeadError: The engine died; or whatever else the socket reader queued, formatted by upstream.
    """
    self._ensure_output_queue_task()
    queue = self.outputs_queue
    if queue.empty():
        _counters["empty"] += 1
        return None
    outputs = queue.get_nowait()
    if isinstance(outputs, Exception):
        raise self._format_exception(outputs) from None
    _counters["dequeued"] += 1
    return outputs


class _TrialError(Exception):
    """What the trial queues, and expects to be raised."""


def difference_of_upstreams_own(owner: type[Any]) -> str | None:  # noqa: PLR0911 - one return for each way to differ
    """Try the class's own ``get_output_nowait`` on a stand-in; None when it behaves as ours, else how it differs.

    An RL framework patches the same name onto vLLM's clients with another contract (it raises when the queue is
    empty), so that the name alone proves nothing.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue()
    stand_in = SimpleNamespace(
        outputs_queue=queue,
        _ensure_output_queue_task=lambda: None,
        _format_exception=lambda error: error,
        resources=SimpleNamespace(engine_dead=False, output_queue_task=object()),
    )
    method: Any = owner.get_output_nowait
    try:
        empty = method(stand_in)
        if asyncio.iscoroutine(empty):
            empty.close()
            return "it is a coroutine"
        if empty is not None:
            return f"on an empty queue it returned {empty!r}, not None"
        queue.put_nowait("first")
        queue.put_nowait("second")
        queue.put_nowait(_TrialError())
        taken = [method(stand_in), method(stand_in)]
    except Exception as error:
        return f"it raised {error!r}"
    if taken != ["first", "second"]:
        return f"it returned {taken!r} where 'first' and 'second' were queued"
    try:
        raised = method(stand_in)
    except _TrialError:
        return None
    except Exception as error:
        return f"a queued exception came out as {error!r}"
    return f"a queued exception was returned as {raised!r}, not raised"
