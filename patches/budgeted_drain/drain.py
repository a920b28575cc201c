"""The loop that replaces both of the orchestrator's loops: wake on arrival, drain within a budget, stages in an order.

One ``DrainLoop`` serves one orchestrator until shutdown, on the orchestrator's thread. This file decides only when a
raw output is taken; ``order.py`` from which stage, ``membership.py`` which replicas there are, and ``dispatch.py``
takes it through upstream's processing.

The budget is shaped after Linux NAPI: an item and a time limit, and a counter for each that says how often a pass
ended on it. The socket readers of all replicas run on the same event loop, so that an empty queue may mean "not read
yet": the loop yields after ``_YIELD_AFTER_NS`` of work, inside a pass too.
"""

from __future__ import annotations

import asyncio
from time import perf_counter_ns
from typing import Any, ClassVar

from omni_fastpath.hooks import HOOKS, PassReport
from omni_fastpath.ledger import Entry

from .dispatch import POLL_WAIT_S, Dispatcher
from .membership import Membership
from .order import Order, floor_of
from .replicas import QueuedReplica, Stage
from .upstream import FIRST_AUDIO_KEY, can_dequeue, gauge_of
from .wakeup import Wakeup

_YIELD_AFTER_NS = 100_000
"""Work after which the loop yields. A yield costs some ten microseconds, and what arrives meanwhile waits for it."""

_IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as upstream's event-driven loop has it: it only paces the monitor's idle note and
the look at membership, since every arrival, attach and shutdown wakes the loop."""


class DrainLoop:
    """Serves one orchestrator's stages until shutdown, with the hooks that plugins implement when it is made.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        runtime: The patch in this process: its values, which are kept, and its counters.
    """

    running: ClassVar[tuple[DrainLoop, ...]] = ()
    """The loops of this process that run now; replaced, never changed, because other threads read it."""

    def __init__(self, orchestrator: Any, runtime: Entry) -> None:
        limits, counters = runtime.options, runtime.counters
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._monitor = orchestrator._orch_monitor
        self._stage_pools = orchestrator.stage_pools
        self._max_items = limits.max_items
        self._max_time_ns = limits.max_time_us * 1000
        self._stop_at_routable = limits.stop_at_first_routable
        self._counters = counters
        self._on_pass_end = HOOKS.observer("on_pass_end")
        self._gauge = gauge_of(orchestrator)
        self._poll_ns = 0
        self._wakeup = Wakeup(counters)
        self._members = members = Membership(orchestrator, can_dequeue, self._arrived, FIRST_AUDIO_KEY)
        floor = floor_of(limits.floor, orchestrator.num_stages)
        self._order = Order(limits.order, floor, HOOKS.chooser(), orchestrator.request_states, members.stages)
        self._dispatcher = Dispatcher(orchestrator, members, counters, self._order.charge)

    async def run(self) -> None:
        """Dispatch until the orchestrator's shutdown event is set; errors propagate as upstream's loops let them."""
        self._wakeup.begin()
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._wakeup.wake())
        DrainLoop.running = (*DrainLoop.running, self)
        members = self._members
        try:
            while not self._shutdown.is_set():
                if members.stale or perf_counter_ns() >= members.look_ns:
                    await self._look()
                happened = await self._poll() if members.polled else False
                stage = self._order.next()
                if stage is not None:
                    await self._pass(stage)
                    self._report_backlog()
                elif happened:
                    await self._wakeup.yield_turns()
                else:
                    await self._idle()
                    continue
                self._monitor.note_loop(idle=False)
        finally:
            DrainLoop.running = tuple(loop for loop in DrainLoop.running if loop is not self)
            shutdown.cancel()
            members.close()

    async def _idle(self) -> None:
        """Sleep until an output, an attach, a poll or shutdown is due."""
        members = self._members
        self._monitor.note_loop(idle=True)
        if members.stale or members.has_backlog():
            await self._wakeup.yield_turns()  # it came behind the loop's back; the event loop still gets its turn
        elif not self._shutdown.is_set():
            await self._wakeup.sleep(POLL_WAIT_S if members.polled else _IDLE_WAIT_S)

    def _arrived(self) -> None:
        self._wakeup.wake()
        self._report_backlog()

    def _report_backlog(self) -> None:
        """Tell upstream's monitor how many raw outputs wait, as its event-driven loop does at each put and get."""
        if self._gauge is not None:
            self._gauge(sum(len(replica.waiting) for replica in self._members.queued()))

    # ---- The replicas, and what can only be polled ----

    def attached(self, pool: Any) -> None:
        """A client was attached to ``pool``, on any thread: look at it now."""
        if any(each is pool for each in self._stage_pools):
            self._members.stale = True
            self._wakeup.wake_from_any_thread()

    async def _look(self) -> None:
        """Look which replicas there are, and release what waits for what left, or for what others took."""
        joined, left = self._members.look(perf_counter_ns())
        for replica in joined:
            if not replica.waiting and not replica.is_gone():
                await self._dispatcher.take_one(replica)  # there is none yet; asking starts upstream's socket reader
        for replica in (*left, *self._members.queued()):
            await self._dispatcher.release(replica)

    async def _poll(self) -> bool:
        """Poll what can only be polled, if that is due; whether there was anything."""
        if perf_counter_ns() < self._poll_ns:
            return False
        found = False
        for replica in self._members.polled:
            if replica.is_gone():
                self._members.stale = True  # a look finds what is in its place
            elif not self._shutdown.is_set():
                found |= await self._dispatcher.poll(replica)
        self._poll_ns = 0 if found else perf_counter_ns() + int(POLL_WAIT_S * 1e9)
        return found

    # ---- One replica ----

    async def _pass(self, stage: Stage) -> None:  # noqa: C901, PLR0912 - flat, because it runs for each raw output
        """Take raw outputs from a replica of ``stage`` until a pass ends.

        A replica of a stage without final output gives one: nothing of it reaches a user before another stage's. So
        does one of a stage that is due: the order goes on after it. Whether an output is routable is asked only where
        it matters: it ends a pass so that another stage gets its turn, which under a fixed order none does.
        """
        replica = stage.take_turn()
        if replica is None:
            return
        order, dispatcher, wakeup = self._order, self._dispatcher, self._wakeup
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
            if outcome == "nothing":
                ended = "gone"
                break
            now_ns = perf_counter_ns()
            order.charge(stage, now_ns - item_ns)
            if replica.awaited_by:
                await dispatcher.release(replica)
                now_ns = perf_counter_ns()
            worked_ns += now_ns - item_ns
            taken += 1
            if outcome == "failed" or self._is_over(replica):
                ended = "gone"
            elif not replica.waiting:
                ended = "empty"
            elif outcome == "routable":
                ended = "routable"
            elif taken >= limit:
                ended = at_limit
            elif worked_ns >= self._max_time_ns:
                ended = "time"
            elif now_ns - wakeup.ended_ns >= _YIELD_AFTER_NS:
                await wakeup.yield_turns()
                now_ns = perf_counter_ns()
                if self._is_over(replica):
                    ended = "gone"
                elif not order.would_go_on(stage):
                    ended = "outranked"
        if not due:
            order.pass_ended(stage)
        self._note_pass(replica, taken, ended, now_ns - started_ns)
        if now_ns - wakeup.ended_ns >= _YIELD_AFTER_NS and self._members.has_backlog():  # else the loop sleeps now
            await wakeup.yield_turns()

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
        if f"ended_{ended}" in counters:
            counters[f"ended_{ended}"] += 1
        if self._on_pass_end is not None:
            report = PassReport(*replica.slot, taken, ended, len(replica.waiting), duration_ns / 1000)
            self._on_pass_end(report=report)
