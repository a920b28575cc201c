"""Which clients are polled, and what other threads and other wrappers do to the membership."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from omni_fastpath.patches.budgeted_drain.membership import Membership
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica


def client() -> Any:
    """A client with an output queue."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    return SimpleNamespace(outputs_queue=queue, get_output_nowait=queue.get_nowait)


def pool(*clients: Any, final_output: bool = True) -> Any:
    """As much of upstream's pool as is read."""
    return SimpleNamespace(
        clients=list(clients),
        stage_type="llm",
        final_output=final_output,
        available_replica_ids=lambda: [n for n, each in enumerate(clients) if each is not None],
        is_replica_available=lambda _replica_id: True,
    )


def members(*pools: Any, can_dequeue: bool = True, key: str | None = None) -> Membership:
    """The membership of an orchestrator with these pools."""
    orchestrator = SimpleNamespace(num_stages=len(pools), stage_pools=pools)
    return Membership(orchestrator, lambda _client: can_dequeue, QueuedReplica.follow_queue, key)


def test_first_audio_is_noticed_at_a_stage_without_final_output() -> None:
    """By the key that upstream uses for it; an exception in the queue has no keys."""
    talker, code2wav = client(), client()
    found = members(pool(talker, final_output=False), pool(code2wav), key="first")
    found.refresh(0)
    first = SimpleNamespace(outputs=[SimpleNamespace(multimodal_output=each) for each in (None, {"first": 1})])
    for item, expected in ((EOFError(), False), (first, True)):
        for each in (talker, code2wav):
            each.outputs_queue.put_nowait(item)
        assert [stage.has_first_audio() for stage in found.stages] == [expected, False]


def test_a_client_with_another_dequeue_is_polled() -> None:
    """It is not the verified one, so that its queue is not touched."""
    unknown = client()
    found = members(pool(unknown), can_dequeue=False)
    assert found.refresh(0) == ([], [])
    assert [each.client for each in found.polled] == [unknown]
    assert "put_nowait" not in vars(unknown.outputs_queue)


def test_attach_during_a_refresh_causes_another_one() -> None:
    """A change that another thread reports meanwhile is not forgotten."""
    one = pool(client())
    found = members(one)

    def attached_meanwhile() -> list[int]:
        found.stale = True
        return [0]

    one.available_replica_ids = attached_meanwhile
    found.refresh(0)
    assert found.stale


def test_another_wrapper_of_a_put_stays() -> None:
    """Restoring the queue's put leaves a later wrapper of another package in place."""
    replica = client()
    found = members(pool(replica))
    found.refresh(0)

    def foreign(_item: Any) -> None:
        """Another package's."""

    replica.outputs_queue.put_nowait = foreign
    found.close()
    assert replica.outputs_queue.put_nowait is foreign


def test_a_replica_that_is_marked_unavailable_leaves() -> None:
    """Although its client is still in its slot."""
    replica = client()
    one = pool(replica)
    found = members(one)
    found.refresh(0)
    one.is_replica_available = lambda _replica_id: False
    one.available_replica_ids = list
    assert [each.client for each in found.refresh(1)[1]] == [replica]
    assert "put_nowait" not in vars(replica.outputs_queue)
