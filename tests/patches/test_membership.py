"""Which clients are polled, and what other threads do to the replicas of the drain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.budgeted_drain import replicas
from omni_fastpath.patches.budgeted_drain.drain import Drain

pytestmark = [pytest.mark.upstream, pytest.mark.usefixtures("installed")]


def client() -> Any:
    """A client with an output queue."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    return SimpleNamespace(outputs_queue=queue, get_output_nowait=lambda: None if queue.empty() else queue.get_nowait())


def pool(*clients: Any) -> Any:
    """As much of upstream's pool as is read."""
    return SimpleNamespace(
        clients=list(clients),
        stage_type="llm",
        available_replica_ids=lambda: [n for n, each in enumerate(clients) if each is not None],
        is_replica_available=lambda _replica_id: True,
    )


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a drain of an orchestrator with these pools, which has looked at them."""
    monkeypatch.setattr(replicas, "can_dequeue", lambda _client: True)

    def made(*pools: Any) -> Drain:
        orchestrator = SimpleNamespace(
            stage_pools=pools, _shutdown_event=asyncio.Event(), _orch_monitor=None, _event_driven_orch=False
        )
        found = Drain(orchestrator, LEDGER.named("budgeted_drain"))
        found._refresh(0)
        return found

    return made


async def test_a_client_with_another_dequeue_is_polled(drain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the verified one, so that its queue is not touched."""
    monkeypatch.setattr(replicas, "can_dequeue", lambda _client: False)
    unknown = client()
    found = drain(pool(unknown))
    assert [each.client for each in found._polled] == [unknown]
    assert "put_nowait" not in vars(unknown.outputs_queue)


async def test_attach_during_a_refresh_causes_another_one(drain: Any) -> None:
    """A change that another thread reports meanwhile is not forgotten."""
    one = pool(client())
    found = drain(one)

    def attached_meanwhile() -> list[int]:
        found.attached()
        return [0]

    one.available_replica_ids = attached_meanwhile
    found._refresh(0)
    assert found._is_stale


async def test_a_replica_that_is_marked_unavailable_leaves(drain: Any) -> None:
    """Although its client is still in its slot; what it sends later is read when it is available again, once."""
    replica = client()
    one = pool(replica)
    found = drain(one)
    one.is_replica_available = lambda _replica_id: False
    one.available_replica_ids = list
    found._refresh(1)
    assert not found._replicas
    assert "put_nowait" not in vars(replica.outputs_queue)
    replica.outputs_queue.put_nowait("something")
    one.is_replica_available = lambda _replica_id: True
    one.available_replica_ids = lambda: [0]
    found._refresh(2)
    assert [each.client for each in found._line] == [replica]
