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


def _class_with(method: Any) -> type:
    return type("Client", (), {"get_output_nowait": method})


def _good(self: Any) -> Any:
    try:
        item = self.outputs_queue.get_nowait()
    except asyncio.QueueEmpty:
        return None
    if isinstance(item, Exception):
        raise self._format_exception(item)
    return item


def _raises_on_empty(self: Any) -> Any:
    return self.outputs_queue.get_nowait()


def _returns_exceptions(self: Any) -> Any:
    return None if self.outputs_queue.empty() else self.outputs_queue.get_nowait()


@pytest.mark.parametrize(
    ("method", "difference"),
    [
        (_good, None),
        (_raises_on_empty, "QueueEmpty"),
        (_returns_exceptions, "_TrialError"),
    ],
)
def test_upstreams_own_is_judged_by_what_it_does(installed: None, method: Any, difference: str | None) -> None:
    """A method of the same name counts as ours only when it behaves like ours."""
    from omni_fastpath.patches.nonblocking_dequeue.wrappers import difference_of_upstreams_own

    found = difference_of_upstreams_own(_class_with(method))
    assert found is None if difference is None else difference in (found or "")


@pytest.mark.parametrize(("method", "state"), [(_good, "superseded"), (_raises_on_empty, "unsupported")])
def test_upstreams_own_is_never_overwritten(monkeypatch: pytest.MonkeyPatch, method: Any, state: str) -> None:
    """Where upstream ships the method it stays, and the state says whether it serves; the drain follows."""
    from vllm.v1.engine.core_client import AsyncMPClient

    from omni_fastpath import config
    from omni_fastpath.declare import Process
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES

    monkeypatch.setattr(AsyncMPClient, "get_output_nowait", method, raising=False)
    try:
        asked = {"OMNI_FASTPATH_NONBLOCKING_DEQUEUE": "1", "OMNI_FASTPATH_BUDGETED_DRAIN": "1"}
        apply(config.resolve([], asked, PATCHES), Process.SERVER)
        assert AsyncMPClient.get_output_nowait is method
        assert LEDGER.named("nonblocking_dequeue").state.value == state
        drain = LEDGER.named("budgeted_drain").state.value
        assert drain == ("applied" if state == "superseded" else "unsupported")
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)
