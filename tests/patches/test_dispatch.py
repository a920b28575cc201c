"""One raw output: what is asked of upstream, in which order, and what becomes of it. On a stand-in for upstream."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgspec")

from omni_fastpath.patches.budgeted_drain.dispatch import Dispatcher, Observers
from omni_fastpath.patches.budgeted_drain.failures import Failures
from omni_fastpath.patches.budgeted_drain.membership import Membership
from omni_fastpath.patches.budgeted_drain.overtaking import HeldEnds, Precedence
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica


class DeadError(Exception):
    """What a dead replica's client raises."""


class _World:
    """An orchestrator of one stage with one replica, which writes down what is asked of it.

    Args:
        raw_outputs: What waits at the replica; an exception is raised by the dequeue.
        fails: What processing raises.
        routable: The policy's answer.
        queued: Whether the client has an output queue; else it is polled.
    """

    def __init__(
        self, *raw_outputs: Any, fails: BaseException | None = None, routable: Any = True, queued: bool = True
    ) -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.routable = routable
        self.client = SimpleNamespace(outputs_queue=asyncio.Queue() if queued else None, rest=list(raw_outputs))
        for each in raw_outputs if queued else ():
            self.client.outputs_queue.put_nowait(each)
        # The pool:
        self.clients: list[Any] = [self.client]
        self.stage_type = "llm"
        self.final_output = True
        # The orchestrator:
        self.num_stages = 1
        self.stage_pools = [self]
        self.request_states: dict[str, Any] = {}
        self._shutdown_event = asyncio.Event()
        self.counters = {"held": 0, "judge_errors": 0}
        self.members = Membership(
            self,
            lambda _client: queued,
            count(),
            lambda: None,
            available_ids=_World.available_replica_ids,
            availability=lambda _pool: self.is_replica_available,
        )
        held_ends, precedence, clock = HeldEnds(), Precedence({}, "error"), count()
        self.dispatcher = Dispatcher(
            self,
            dequeue=self._dequeue,
            read=_World._poll_stage_raw,
            is_diffusion_start=lambda _output: False,
            members=self.members,
            held_ends=held_ends,
            precedence=precedence,
            failures=Failures(self, DeadError, self.members, held_ends, precedence, clock),
            is_routable=self._policy,
            observers=Observers(
                on_dequeued=lambda **_: self.calls.append("on_dequeued"),
                on_routed=lambda **_: self.calls.append("on_routed"),
            ),
            counters=self.counters,
            clock=clock,
            charge=lambda *_: None,
        )
        self.members.look(0)

    @property
    def replica(self) -> QueuedReplica:
        return self.members.queued[0, 0]

    def _dequeue(self, client: Any) -> Any:
        queue = client.outputs_queue
        if queue.empty():
            return None
        taken = queue.get_nowait()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def _policy(self, _view: Any) -> bool:
        self.calls.append("policy")
        if isinstance(self.routable, Exception):
            raise self.routable
        return bool(self.routable)

    # What upstream's pool has.

    def is_replica_available(self, replica_id: int) -> bool:
        return self.clients[replica_id] is not None

    def available_replica_ids(self) -> list[int]:
        return [0] if self.clients[0] is not None else []

    def live_replica_ids(self) -> list[int]:
        return self.available_replica_ids()

    async def _poll_stage_raw(self, client: Any) -> Any:
        self.calls.append("_poll_stage_raw")
        raw = await client.get_output_async()
        return raw if raw.outputs else None

    async def poll_llm_raw_output(self, _replica_id: int, *, timeout_s: float) -> Any:
        self.calls.append("poll_llm_raw_output")
        assert timeout_s > 0
        return self.client.rest.pop(0) if self.client.rest else None

    # What upstream's orchestrator has.

    async def _process_llm_stage_outputs(self, _stage: int, _replica: int, raw: Any, terminal: set[str]) -> list[Any]:
        self.calls.append("process")
        terminal.update(raw.ended)
        if self.fails is not None:
            raise self.fails
        return list(raw.outputs)

    async def _handle_processed_outputs(self, _stage: int, _replica: int, outputs: list[Any]) -> None:
        self.calls.append(f"route {len(outputs)}")

    async def _finish_raw_terminal_requests(self, _stage: int, _replica: int, request_ids: set[str]) -> None:
        self.calls.append(f"finish {sorted(request_ids)}")

    async def _handle_dead_replica(self, stage_id: int, replica_id: int, _error: BaseException) -> None:
        self.calls.append(f"evict {stage_id}.{replica_id}")
        self.clients[replica_id] = None


def raw(*outputs: str, ended: tuple[str, ...] = ()) -> Any:
    """A raw output."""
    return SimpleNamespace(outputs=list(outputs), ended=ended)


async def test_one_goes_through_all_of_upstreams_handling() -> None:
    """Keep-or-drop, processing, routing and the terminal bookkeeping, each once and in upstream's order."""
    world = _World(raw("one", "two", ended=("one",)), raw("three"))
    assert await world.dispatcher.take_one(world.replica) == "dispatched"
    assert world.calls == [
        "_poll_stage_raw", "on_dequeued", "process", "route 2", "finish ['one']", "on_routed", "on_routed",
    ]  # fmt: skip
    assert list(world.replica.waiting) == [raw("three")]
    assert world.replica.arrivals.taken == 0


@pytest.mark.parametrize(
    ("answer", "outcome"), [(True, "routable"), (False, "dispatched"), (ValueError("policy"), "routable")]
)
async def test_judged_before_it_is_routed(answer: Any, outcome: str) -> None:
    """Routing forgets a request that ends. A policy that raises counts as "yes", and is counted."""
    world = _World(raw("one"), routable=answer)
    assert await world.dispatcher.take_one(world.replica, judge=True) == outcome
    assert world.calls.index("policy") == world.calls.index("route 1") - 1
    assert world.counters["judge_errors"] == isinstance(answer, Exception)


async def test_not_judged_unless_it_is_asked_for() -> None:
    """Where the end of a pass lets nobody in, the policy costs nothing."""
    world = _World(raw("one"))
    await world.dispatcher.take_one(world.replica)
    assert "policy" not in world.calls


async def test_nothing_there_asks_upstream_for_nothing() -> None:
    """An empty queue is no raw output."""
    world = _World()
    assert await world.dispatcher.take_one(world.replica) == "nothing"
    assert world.calls == []


async def test_one_without_content_is_dropped() -> None:
    """By upstream's rule, and nobody is told of it."""
    world = _World(raw())
    assert await world.dispatcher.take_one(world.replica) == "dropped"
    assert world.calls == ["_poll_stage_raw"]


async def test_dead_replica_is_evicted_when_its_news_is_read() -> None:
    """It is no raw output, and the loop goes on."""
    world = _World(DeadError())
    assert await world.dispatcher.take_one(world.replica) == "unreadable"
    assert world.calls == ["evict 0.0"]
    assert world.replica.is_gone()


async def test_replica_that_dies_in_processing_is_evicted() -> None:
    """What was taken was not routed."""
    world = _World(raw("one"), fails=DeadError())
    assert await world.dispatcher.take_one(world.replica) == "failed"
    assert world.calls == ["_poll_stage_raw", "on_dequeued", "process", "evict 0.0"]


@pytest.mark.parametrize("where", ["reading", "processing"])
async def test_other_errors_end_the_loop_but_not_during_shutdown(where: str) -> None:
    """As upstream's loops let them."""
    expected = "unreadable" if where == "reading" else "failed"
    for shutdown in (False, True):
        error = ValueError("ours to pass on")
        world = _World(error) if where == "reading" else _World(raw("one"), fails=error)
        if shutdown:
            world._shutdown_event.set()
            assert await world.dispatcher.take_one(world.replica) == expected
        else:
            with pytest.raises(ValueError, match="ours to pass on"):
                await world.dispatcher.take_one(world.replica)


async def test_cancellation_is_passed_on_also_during_shutdown() -> None:
    """It is the task's, not the raw output's."""
    world = _World(raw("one"), fails=asyncio.CancelledError())
    world._shutdown_event.set()
    with pytest.raises(asyncio.CancelledError):
        await world.dispatcher.take_one(world.replica)


async def test_polled_one_goes_the_same_way() -> None:
    """A client without a queue: upstream's own poll reads it, and the rest is the same."""
    world = _World(raw("one"), queued=False)
    (replica,) = world.members.polled
    assert await world.dispatcher.poll(replica) is True
    assert world.calls == ["poll_llm_raw_output", "on_dequeued", "process", "route 1", "finish []", "on_routed"]
    assert await world.dispatcher.poll(replica) is False
