"""Which clients are polled, and what other threads do to the replicas of the drain."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.rigs.inprocess import Pipeline, Stage
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.budgeted_drain import replicas
from omni_fastpath.patches.budgeted_drain.drain import Drain

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


def drain() -> tuple[Drain, Any, Any]:
    """A drain that has looked at upstream's pool of one replica; that pool; and the replica's client."""
    pipeline = Pipeline([Stage(True, "audio")])
    found = Drain(pipeline.orchestrator, LEDGER.named("budgeted_drain"))
    found._refresh(0)
    return found, pipeline.pools[0], pipeline.replicas[0][0]


async def test_a_client_with_another_dequeue_is_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the verified one, so that its queue is not touched."""
    monkeypatch.setattr(replicas, "can_dequeue", lambda _client: False)
    found, _, client = drain()
    assert [each.client for each in found._polled] == [client]
    assert "put_nowait" not in vars(client.outputs_queue)


async def test_attach_during_a_refresh_causes_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that another thread reports meanwhile is not forgotten."""
    found, pool, _ = drain()

    def attached_meanwhile() -> list[int]:
        found.attached()
        return [0]

    monkeypatch.setattr(pool, "available_replica_ids", attached_meanwhile)
    found._refresh(0)
    assert found._is_stale


@pytest.mark.parametrize("is_covered", [False, True])
async def test_a_replica_that_is_marked_unavailable_leaves(is_covered: bool) -> None:
    """Although its client is still in its slot; what it sends later is read when it is available again, once.

    Another package's wrapper around the queue's ``put_nowait`` stays, and no place is taken through it meanwhile.
    """
    found, pool, client = drain()
    queue = client.outputs_queue
    if is_covered:
        queue.put_nowait = partial(queue.put_nowait)
    pool._unavailable_replicas.add(0)
    found._refresh(1)
    assert not found._replicas
    assert ("put_nowait" in vars(queue)) == is_covered
    queue.put_nowait("something")
    assert not found._line
    pool._unavailable_replicas.clear()
    found._refresh(2)
    queue.put_nowait("more")
    assert [each.client for each in found._line.values()] == [client] * queue.qsize() == [client] * 2
