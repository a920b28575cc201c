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


def difference_of_upstreams_own(owner: type[Any]) -> str | None:
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
    expected = [None, "first", "second", "a raised exception"]
    found: list[Any] = []
    try:
        found.append(owner.get_output_nowait(stand_in))
        for item in ("first", "second", _TrialError()):
            queue.put_nowait(item)
        found.extend(owner.get_output_nowait(stand_in) for _ in range(3))
    except _TrialError:
        found.append("a raised exception")
    except Exception as error:
        found.append(error)
    for each in found:
        if asyncio.iscoroutine(each):
            each.close()
    return None if found == expected else f"it gave {found!r} where {expected!r} is expected"
