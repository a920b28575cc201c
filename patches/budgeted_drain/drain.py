"""The loop that replaces both of the orchestrator's loops: wake on arrival, drain within a budget, stages in an order.

One ``DrainLoop`` serves one orchestrator until shutdown, on the orchestrator's thread. This file decides only when a
raw output is taken; ``order.py`` from which stage, ``membership.py`` who is there, and ``dispatch.py`` what happens
to it.

The budget is shaped after Linux NAPI: an item and a time limit, and a counter for each that says how often a pass
ended on it. The socket readers of all replicas run on the same event loop, so that an empty queue may mean "not read
yet": the loop yields after ``_YIELD_AFTER_NS`` of work, inside a pass too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple, Protocol

from omni_fastpath.hooks.specs import PassReport, RawOutputView

from .dispatch import POLL_WAIT_S, Dispatcher, Observers, Outcome
from .failures import Failures
from .membership import Membership
from .order import NextStage, Order, floor_of
from .overtaking import HeldEnds, Precedence
from .pauses import Pauses
from .replicas import QueuedReplica, Stage

_YIELD_AFTER_NS = 100_000
"""Work after which the loop yields. A yield costs some ten microseconds, and what arrives meanwhile waits for it."""

_IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as upstream's event-driven loop has it: it only paces the monitor's idle note and
the look at membership, since every arrival, attach and shutdown wakes the loop."""

_COUNTED_ENDINGS = ("empty", "routable", "items", "time", "floor", "outranked")


class Upstream(NamedTuple):
    """What the loop needs of upstream besides the orchestrator itself, so that these files import none of it."""

    dead_error: type[BaseException]
    is_diffusion_start: Callable[[Any], bool]
    dequeue: Callable[[Any], Any]
    """The dequeue that never waits, as a function of the client. Bound once: a class that somebody changes later must
    not change a loop that runs."""
    can_dequeue: Callable[[Any], bool]
    """Whether a client is served with ``dequeue``; any other is polled as upstream polls it."""
    error_reason: Any
    """``FinishReason.ERROR``."""
    read: Callable[[Any, Any], Awaitable[Any]]
    """Its reading of a raw output, keep-or-drop rule and rehydration included, as a function of pool and client."""
    keeps_last_message: bool
    """Whether a request's last message waits for the stages before, where later text overwrites it."""
    first_audio_key: str | None
    """The name in a payload by which it knows a first audio that it gives the user at once; None where it has none."""
    monitor: Any
    """The orchestrator's monitor."""


class Limits(Protocol):
    """The values of ``budgeted_drain``."""

    max_items: int
    max_time_us: int
    stop_at_first_routable: bool
    order: str
    floor: float | None


class DrainLoop:
    """Serves one orchestrator's stages until shutdown.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        limits: Item and time budget, whether a routable output ends a pass, order and floor.
        counters: The patch's engagement counters.
        is_routable: Whether a processed raw output is routable; an exception of its counts as "yes".
        ask: A plugin's choice of the next stage; None when nobody has one.
        observers: Hooks to call.
        upstream: What else is needed of upstream.
        gauge: Told how many raw outputs wait; None where upstream's loop would not tell it.
    """

    running: ClassVar[tuple[DrainLoop, ...]] = ()
    """The loops of this process that run now; replaced, never changed, because other threads read it."""

    def __init__(
        self,
        orchestrator: Any,
        limits: Limits,
        counters: dict[str, int],
        is_routable: Callable[[RawOutputView], bool],
        ask: NextStage | None,
        observers: Observers,
        upstream: Upstream,
        gauge: Callable[[int], None] | None = None,
    ) -> None:
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._monitor = upstream.monitor
        self._max_items = limits.max_items
        self._max_time_ns = limits.max_time_us * 1000
        self._stop_at_routable = limits.stop_at_first_routable
        self._counters = counters
        self._on_pass_end = observers.on_pass_end
        self._gauge = gauge
        self._pauses = Pauses(counters)
        self._order = Order(
            limits.order, floor_of(limits.floor, orchestrator.num_stages), ask, orchestrator.request_states
        )
        clock = count()
        on_put = self._pauses.wake if gauge is None else self._wake_and_report
        self._members = Membership(
            orchestrator,
            upstream.can_dequeue,
            clock,
            on_put,
            first_audio_key=upstream.first_audio_key,
        )
        self._held_ends = HeldEnds()
        precedence = Precedence(
            orchestrator.request_states, upstream.error_reason, overwrites=upstream.keeps_last_message
        )
        failures = Failures(orchestrator, upstream.dead_error, self._members, self._held_ends, precedence, clock)
        self._dispatcher = Dispatcher(
            orchestrator,
            dequeue=upstream.dequeue,
            read=upstream.read,
            is_diffusion_start=upstream.is_diffusion_start,
            members=self._members,
            held_ends=self._held_ends,
            precedence=precedence,
            failures=failures,
            is_routable=is_routable,
            observers=observers,
            counters=counters,
            clock=clock,
            charge=self._order.charge,
        )
        self._poll_ns = 0

    async def run(self) -> None:
        """Dispatch until the orchestrator's shutdown event is set; errors propagate as upstream's loops let them."""
        self._pauses.begin()
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._pauses.wake())
        DrainLoop.running = (*DrainLoop.running, self)
        members, note_loop = self._members, self._monitor.note_loop
        try:
            while not self._shutdown.is_set():
                stage = self._order.next()
                if stage is not None:
                    await self._pass(stage)
                    note_loop(idle=False)
                    if self._gauge is not None:
                        self._report_backlog()
                    if perf_counter_ns() < members.look_ns and not members.stale:
                        continue
                happened = await self._look_and_poll()
                if stage is not None:
                    continue
                if happened:
                    await self._pauses.give_way()
                    continue
                if self._held_ends and not members.has_backlog():
                    await self._dispatcher.release(self._held_ends.release_all())
                note_loop(idle=True)
                await self._sleep()
        finally:
            DrainLoop.running = tuple(loop for loop in DrainLoop.running if loop is not self)
            shutdown.cancel()
            members.close()

    async def _sleep(self) -> None:
        """Sleep until an output, an attach, a poll or shutdown is due."""
        members = self._members
        if members.stale or members.has_backlog():
            await self._pauses.give_way()  # it came behind the loop's back; the event loop still gets its turn
            return
        now_ns = await self._pauses.sleep(POLL_WAIT_S if members.polled else _IDLE_WAIT_S)
        if not self._held_ends:  # what is held may wait for a replica that is gone
            members.put_off(now_ns)

    def _wake_and_report(self) -> None:
        self._pauses.wake()
        self._report_backlog()

    def _report_backlog(self) -> None:
        """Tell upstream's monitor how many raw outputs wait, as its event-driven loop does at each put and get."""
        if self._gauge is not None:
            self._gauge(sum(len(replica.waiting) for replica in self._members.queued.values()))

    # ---- Who is there, and what can only be polled ----

    def attached(self, pool: Any) -> None:
        """A client was attached to ``pool``, on whatever thread: look at it now, not at the next idle note."""
        if self._members.serves(pool):
            self._members.stale = True
            self._pauses.wake_from_any_thread()

    async def _look_and_poll(self) -> bool:
        """Look at who is there, and poll what can only be polled, each if it is due; whether anything happened."""
        now_ns = perf_counter_ns()
        happened = False
        if self._members.stale or now_ns >= self._members.look_ns:
            happened = await self._look_at_members(now_ns)
        if self._members.polled and now_ns >= self._poll_ns:
            polled = False
            for replica in self._members.polled:
                if self._shutdown.is_set():
                    return True
                if not replica.is_gone():  # the next look finds who is in its place
                    polled |= await self._dispatcher.poll(replica)
            self._poll_ns = 0 if polled else perf_counter_ns() + int(POLL_WAIT_S * 1e9)
            happened |= polled
        return happened

    async def _look_at_members(self, now_ns: int) -> bool:
        """Look at who is there; whether that has changed."""
        joined, left = self._members.look(now_ns)
        if not joined and not left:
            return False
        self._order.arrange(self._members.stages)
        for replica in joined:
            if not replica.waiting and not replica.is_gone():
                await self._dispatcher.take_one(replica)  # nothing; it starts upstream's socket reader
        for replica in left:
            await self._dispatcher.release(self._held_ends.release_without(replica))
        return True

    # ---- One replica ----

    async def _pass(self, stage: Stage) -> None:  # noqa: C901 - flat, because it runs for each raw output
        """Take raw outputs from a replica of ``stage`` until a pass ends.

        A replica of a stage that nobody sees gives one: it has no reason to be drained ahead of one that is seen. So
        does one of a stage that is due: the order goes on after it. Whether an output is routable is asked only where
        it matters: it ends a pass so that another stage gets its turn, and under a fixed order nobody's turn comes.
        """
        replica = stage.take_turn()
        if replica is None:
            return
        order, dispatcher, pauses = self._order, self._dispatcher, self._pauses
        due = order.due is stage
        judges = stage.final_output and self._stop_at_routable and order.in_turn
        limit, at_limit = (self._max_items, "items") if stage.final_output else (1, "one")
        if due:
            limit, at_limit = 1, "floor"
        taken = worked_ns = 0
        ended: str | None = "gone" if self._is_over(replica) else None
        started_ns = now_ns = perf_counter_ns()
        while ended is None:
            item_ns = now_ns
            outcome = await dispatcher.take_one(replica, judge=judges and order.contested)
            if outcome in ("nothing", "unreadable"):
                ended = "empty" if outcome == "nothing" else "gone"
                break
            now_ns = perf_counter_ns()
            order.charge(stage, now_ns - item_ns)
            if replica.awaited_by and (ripe := self._held_ends.release_after(replica)):
                await dispatcher.release(ripe)
                now_ns = perf_counter_ns()
            worked_ns += now_ns - item_ns
            taken += 1
            ended = self._ending(outcome, replica)
            if ended is None and taken >= limit:
                ended = at_limit
            elif ended is None and worked_ns >= self._max_time_ns:
                ended = "time"
            elif ended is None and now_ns - pauses.ended_ns >= _YIELD_AFTER_NS:
                ended = await self._yield_in_pass(replica)
                now_ns = perf_counter_ns()
        if not due:
            order.pass_ended(stage)
        self._note_pass(replica, taken, ended, now_ns - started_ns)
        if now_ns - pauses.ended_ns >= _YIELD_AFTER_NS and self._members.has_backlog():  # else the loop sleeps now
            await self._pauses.give_way()

    async def _yield_in_pass(self, replica: QueuedReplica) -> str | None:
        """Yield in the middle of a pass; why it ends there, or None when it goes on."""
        await self._pauses.give_way()
        if self._is_over(replica):
            return "gone"
        return None if self._order.would_go_on(replica.stage) else "outranked"

    def _ending(self, outcome: Outcome, replica: QueuedReplica) -> str | None:
        """Why a pass ends after this outcome, budgets apart."""
        if outcome == "failed" or self._is_over(replica):
            return "gone"
        if not replica.waiting:
            return "empty"
        return "routable" if outcome == "routable" else None

    def _is_over(self, replica: QueuedReplica) -> bool:
        """Whether nothing more may be taken from a replica: it is gone, or it is shutdown."""
        return self._shutdown.is_set() or replica.is_gone()

    def _note_pass(self, replica: QueuedReplica, taken: int, ended: str, duration_ns: int) -> None:
        if ended == "gone":
            self._members.stale = True
        if not taken:
            return
        counters = self._counters
        counters["items"] += taken
        counters["passes"] += 1
        if ended in _COUNTED_ENDINGS:
            counters[f"ended_{ended}"] += 1
        if self._on_pass_end is not None:
            waiting, duration_us = len(replica.waiting), duration_ns / 1000
            report = PassReport(replica.stage_id, replica.replica_id, taken, ended, waiting, duration_us)
            self._on_pass_end(report=report)
