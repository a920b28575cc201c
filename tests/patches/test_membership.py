"""Which replicas are found, and what is in front of their queues' put. On stand-ins."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from omni_fastpath.patches.budgeted_drain.membership import Membership
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica


class _Pool:
    """Stands for upstream's pool."""

    def __init__(self, *clients: Any, stage_type: str = "llm") -> None:
        self.clients = list(clients)
        self.stage_type = stage_type
        self.final_output = True
        self.unavailable: set[int] = set()

    def is_replica_available(self, replica_id: int) -> bool:
        return self.clients[replica_id] is not None and replica_id not in self.unavailable

    def available_replica_ids(self) -> list[int]:
        return [replica_id for replica_id in range(len(self.clients)) if self.is_replica_available(replica_id)]


def client(*waiting: Any) -> Any:
    """A client with an output queue in which so much waits."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for each in waiting:
        queue.put_nowait(each)
    return SimpleNamespace(outputs_queue=queue, get_output_nowait=queue.get_nowait)


def has_notifier(found: Any) -> bool:
    """Whether there is something of ours in front of this client's put."""
    return "put_nowait" in vars(found.outputs_queue)


def members(
    *pools: _Pool, can_dequeue: bool = True, on_put: Any = QueuedReplica.follow_queue, key: str | None = None
) -> Membership:
    """The membership of an orchestrator with these pools."""
    orchestrator = SimpleNamespace(num_stages=len(pools), stage_pools=pools)
    return Membership(orchestrator, lambda _client: can_dequeue, on_put, key)


def slots(replicas: Any) -> list[tuple[int, int]]:
    """Stage and slot of each."""
    return [replica.slot for replica in replicas]


def test_first_refresh_finds_all() -> None:
    """Every available replica with a queue joins, grouped by stage; what waits is seen, later puts are told."""
    puts: list[QueuedReplica] = []
    pools = _Pool(client("a"), client()), _Pool(client())
    found = members(*pools, on_put=puts.append)
    assert found.stale
    joined, left = found.refresh(0)
    assert (slots(joined), left, found.polled) == ([(0, 0), (0, 1), (1, 0)], [], [])
    assert [(stage.stage_id, slots(stage.replicas)) for stage in found.stages] == [
        (0, [(0, 0), (0, 1)]),
        (1, [(1, 0)]),
    ]
    assert found.has_backlog()
    pools[1].clients[0].outputs_queue.put_nowait("b")
    assert puts == [joined[2]]
    assert [list(replica.waiting) for replica in joined] == [["a"], [], ["b"]]
    joined[2].follow_queue()
    assert joined[2].arrivals[0].number > joined[0].arrivals[0].number


def test_replica_that_left_gets_its_queue_back() -> None:
    """Evicted, marked unavailable, or another client is in its slot, which joins; the stage keeps what it is owed."""
    pool = _Pool(client("a"), client("b"), client("c"))
    before, new = [*pool.clients], client()
    found = members(pool)
    found.refresh(0)
    [stage] = found.stages
    pool.clients[0] = None
    pool.clients[1] = new
    pool.unavailable.add(2)
    joined, left = found.refresh(1)
    assert [each.client for each in joined] == [new]
    assert [each.client for each in left] == before
    assert all(each.is_gone() for each in left)
    assert [has_notifier(each) for each in (*before, new)] == [False, False, False, True]
    assert (found.stages, list(stage.replicas)) == ([stage], joined)


def test_first_audio_is_seen_when_it_comes_or_is_there_already() -> None:
    """At a stage that nobody sees, by the key that upstream knows it by; an exception in the queue has none."""

    def raw(key: str) -> Any:
        return SimpleNamespace(
            outputs=[SimpleNamespace(multimodal_output=None), SimpleNamespace(multimodal_output={key: 1})]
        )

    pools = _Pool(client(raw("first"))), _Pool(client(raw("other"))), _Pool(client(raw("first")))
    pools[2].final_output = True
    pools[0].final_output = pools[1].final_output = False
    found = members(*pools, key="first")
    found.refresh(0)
    assert [stage.has_first_audio() for stage in found.stages] == [True, False, False]
    stage = found.stages[1]
    for item, has_some in ((EOFError(), False), (raw("first"), True), (raw("other"), True)):
        pools[1].clients[0].outputs_queue.put_nowait(item)
        assert stage.has_first_audio() is has_some
    for has_some in (True, True, False, False):
        stage.replicas[0].dequeue()
        stage.replicas[0].follow_queue()
        assert stage.has_first_audio() is has_some


def test_what_can_only_be_polled() -> None:
    """A diffusion stage, a client without such a queue, and one whose dequeue is not the verified one are polled."""
    found = members(_Pool(client(), stage_type="diffusion"), _Pool(SimpleNamespace()), _Pool(None))
    assert found.refresh(0) == ([], [])
    assert slots(found.polled) == [(0, 0), (1, 0)]
    pool = _Pool(client("a"))
    found = members(pool, can_dequeue=False)
    assert found.refresh(0) == ([], [])
    assert slots(found.polled) == [(0, 0)]
    assert not has_notifier(pool.clients[0])


def test_attach_during_a_refresh_causes_another_one() -> None:
    """Who says meanwhile, on another thread, that membership has changed is not forgotten."""
    pool = _Pool(client())
    found = members(pool)
    ids = pool.available_replica_ids

    def attached_meanwhile() -> list[int]:
        found.stale = True
        return ids()

    pool.available_replica_ids = attached_meanwhile  # type: ignore[method-assign]
    found.refresh(0)
    assert found.stale


def test_close_gives_all_queues_back() -> None:
    """Unless somebody else has put something in front of ours meanwhile: that stays."""
    pool = _Pool(client(), client())
    found = members(pool)
    found.refresh(0)
    theirs = pool.clients[1].outputs_queue

    def foreign(_item: Any) -> None:
        """Somebody else's."""

    theirs.put_nowait = foreign
    found.close()
    assert not has_notifier(pool.clients[0])
    assert theirs.put_nowait is foreign
