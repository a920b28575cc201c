"""``get_output_nowait``: the contract, on vLLM's real client, and the trial of one that upstream may have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.fixture
def installed() -> Iterator[None]:
    """The patch alone."""
    with only("nonblocking_dequeue"):
        yield


@pytest.fixture
def replica(installed: None) -> Any:
    """A real ``AsyncMPClient`` without an engine behind it."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

    return Replica(0, QWEN3_OMNI[0], 0)


def test_order_is_first_in_first_out(replica: Any) -> None:
    """What was queued first comes first, each once, and then None."""
    batches = [object() for _ in range(5)]
    for each in batches:
        replica.outputs_queue.put_nowait(each)
    assert [replica.get_output_nowait() for _ in range(6)] == [*batches, None]


@pytest.mark.parametrize("dead", [False, True])
def test_queued_exception_is_raised_as_upstream_raises_it(replica: Any, dead: bool) -> None:
    """Type, message, context suppression and cause equal those of ``get_output_async``, engine dead or not."""
    replica.resources.engine_dead = dead
    raised = []
    for take in (replica.get_output_nowait, lambda: asyncio.run(replica.get_output_async())):
        replica.outputs_queue.put_nowait(ValueError("from the reader"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
            take()
        error = caught.value
        raised.append((type(error), str(error), error.__suppress_context__, error.__cause__))
    assert raised[0] == raised[1]


def test_reader_task_is_started_by_the_first_call(replica: Any) -> None:
    """A client built without a running loop starts its socket reader at the first dequeue, as upstream's does."""
    started = []
    replica._ensure_output_queue_task = lambda: started.append(True)
    replica.get_output_nowait()
    assert started == [True]


def test_somebody_elses_is_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another package has given the client the method it stays; the patch is unsupported, and so is the drain."""
    from vllm.v1.engine.core_client import AsyncMPClient

    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES

    def method(self: Any) -> Any:
        return self.outputs_queue.get_nowait()  # an RL framework's: it raises when the queue is empty

    monkeypatch.setattr(AsyncMPClient, "get_output_nowait", method, raising=False)
    try:
        asked_for = ("nonblocking_dequeue", "budgeted_drain")
        environ = {f"OMNI_FASTPATH_{name.upper()}": "1" for name in asked_for}
        apply(config.resolve([], environ, PATCHES), Process.SERVER)
        assert AsyncMPClient.get_output_nowait is method
        for name in asked_for:
            assert LEDGER.named(name).state is State.UNSUPPORTED
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)
