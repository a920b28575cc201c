"""The loop that replaces both of the orchestrator's loops: wake on arrival, drain within a budget, stages in an order.

One ``DrainLoop`` serves one orchestrator until shutdown, on the orchestrator's thread. This file decides only when a
raw output is taken. ``order.py`` decides from which stage, ``membership.py`` finds the replicas, and
``dispatch.py`` runs upstream's processing.

The budget follows Linux NAPI. It has an item limit and a time limit, and one counter for each that counts the passes
that ended on it. The socket readers of all replicas run on the same event loop, so that an empty queue may only mean
that it was not read yet. Therefore the loop yields after ``_YIELD_AFTER_NS`` of work, also inside a pass.

After an exception at any line of this patch, upstream's loop replaces this one (``DrainLoop.run``). An exception
leaves the work in one of these states, and ``Dispatcher.finish`` completes it from each.

- In a client's queue: it is dispatched in the order of arrival. What has no number yet, and an exception, stays there
  for upstream's loop.
- In ``Dispatcher.works``, not processed: taken, split or held. Each entry is in one work, at every line of a split.
- In ``Dispatcher.works``, processed: the routing, the bookkeeping of ends, or both are left to do.
- In ``Dispatcher.works``, done: nothing is left to do.
- An exception that upstream raised and that was being handled: it is the context of the one in this patch.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any, ClassVar

from omni_fastpath.hooks import HOOKS, PassReport
from omni_fastpath.ledger import Entry, raised_by_us

from .dispatch import POLL_WAIT_S, Dispatcher
from .membership import Membership
from .order import Decision, Order, floor_of
from .replicas import QueuedReplica
from .upstream import FIRST_AUDIO_KEY, can_dequeue, gauge_of
from .wakeup import Wakeup

_YIELD_AFTER_NS = 100_000
"""Work after which the loop yields. A yield costs some ten microseconds, and what arrives meanwhile waits for it."""

_IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as in upstream's event-driven loop. It only paces the monitor's idle note and the
refresh of membership, because every arrival, attach and shutdown wakes the loop."""


class DrainLoop:
    """Serves one orchestrator's stages until shutdown, with the hooks that plugins implement when it is created.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        runtime: The patch in this process. Its values are read once.
    """

    running: ClassVar[tuple[DrainLoop, ...]] = ()
    """The running loops of this process. It is replaced and never changed, because other threads read it."""

    def __init__(self, orchestrator: Any, runtime: Entry) -> None:
        limits, counters = runtime.options, runtime.counters
        self._runtime = runtime
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._monitor = orchestrator._orch_monitor
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
        self._dispatcher = Dispatcher(orchestrator, members, runtime, self._order.charge)

    async def run(self, upstreams_loop: Callable[[], Awaitable[None]]) -> None:
        """Dispatch until the orchestrator's shutdown event is set.

        After an exception in this patch upstream's loop serves the same clients. Exceptions of upstream propagate as
        from its own loops.

        Args:
            upstreams_loop: The loop that this one replaces.
        """
        interrupted: BaseException | None = None
        outside = sys.exc_info()[1]  # what is handled outside of this call
        DrainLoop.running = (*DrainLoop.running, self)
        try:
            await self._serve()
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._runtime.fail("the drain", error)
            interrupted = error.__context__ if error.__context__ is not outside else None
        finally:
            DrainLoop.running = tuple(loop for loop in DrainLoop.running if loop is not self)
            self._members.close()
        if self._runtime.has_failed and not self._shutdown.is_set():
            await self._dispatcher.finish(interrupted)
            await upstreams_loop()

    async def _serve(self) -> None:
        """Dispatch until shutdown, or until this patch has failed somewhere else."""
        self._wakeup.begin()
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._wakeup.wake())
        members = self._members
        try:
            while not self._shutdown.is_set() and not self._runtime.has_failed:
                if members.stale or perf_counter_ns() >= members.refresh_ns:
                    await self._refresh()
                happened = await self._poll() if members.polled else False
                decision = self._order.decide()
                if decision is not None:
                    await self._pass(decision)
                    self._report_backlog()
                elif happened:
                    await self._wakeup.yield_turns()
                else:
                    await self._idle()
                    continue
                self._monitor.note_loop(idle=False)
        finally:
            shutdown.cancel()

    async def _idle(self) -> None:
        """Sleep until an output, an attach, a poll or shutdown is due."""
        members = self._members
        self._monitor.note_loop(idle=True)
        if members.stale or members.has_backlog():
            await self._wakeup.yield_turns()  # an output arrived unnoticed, but other tasks must run too
        elif not self._shutdown.is_set():
            await self._wakeup.sleep(POLL_WAIT_S if members.polled else _IDLE_WAIT_S)

    def _arrived(self, replica: QueuedReplica) -> None:
        """Notice a put. Never raises, because vLLM's reader would take an exception for a failure of the engine.

        After a failure nothing is numbered, so that all numbered arrivals are earlier than those without a number.
        """
        try:
            self._wakeup.wake()
            if not self._runtime.has_failed:
                replica.follow_queue()
                self._report_backlog()
        except Exception as error:
            self._runtime.fail("noticing an arrival", error)

    def _report_backlog(self) -> None:
        """Report the number of queued raw outputs to upstream's monitor, as its event-driven loop does."""
        if self._gauge is not None:
            self._gauge(sum(len(replica.waiting) for replica in self._members.queued()))

    # ---- The replicas, and those that can only be polled ----

    def attached(self) -> None:
        """Note that a client was attached. May be called on any thread."""
        self._members.stale = True
        self._wakeup.wake_from_any_thread()

    async def _refresh(self) -> None:
        """Update the replicas. Release the ends that waited for removed replicas, or for what other code has taken."""
        joined, left = self._members.refresh(perf_counter_ns())
        for replica in joined:
            if not replica.waiting and not replica.is_gone():
                replica.dequeue()  # returns None, but starts upstream's socket reader
        for replica in (*left, *self._members.queued()):
            await self._dispatcher.release(replica)

    async def _poll(self) -> bool:
        """Poll the replicas that can only be polled, if that is due, and return whether one had an output."""
        if perf_counter_ns() < self._poll_ns:
            return False
        found = False
        for replica in self._members.polled:
            if replica.is_gone():
                self._members.stale = True  # a refresh finds its successor
            elif not self._shutdown.is_set():
                found |= await self._dispatcher.poll(replica)
        self._poll_ns = 0 if found else perf_counter_ns() + int(POLL_WAIT_S * 1e9)
        return found

    # ---- One replica ----

    async def _pass(self, decision: Decision) -> None:  # noqa: C901, PLR0912 - flat, because it runs for each raw output
        """Take raw outputs from a replica of a stage until a pass ends.

        The pass takes only one output from a stage that is due, and then the order applies again. A routable output
        ends a pass so that another stage gets its turn. Under a fixed order none does, so outputs are not judged.
        """
        stage, now_decided = decision.stage, decision
        replica = stage.take_turn()
        if replica is None:
            return
        order, dispatcher, wakeup = self._order, self._dispatcher, self._wakeup
        judges = stage.final_output and self._stop_at_routable
        limit, at_limit = (1, "floor") if decision.due else (self._max_items, "items")
        items = worked_ns = 0
        ended: str | None = "gone" if self._is_over(replica) else None
        started_ns = now_ns = perf_counter_ns()
        while ended is None:
            item_ns = now_ns
            outcome = await dispatcher.take_one(replica, judge=judges and now_decided.contested)
            if outcome == "nothing":
                ended = "gone"
                break
            now_ns = perf_counter_ns()
            order.charge(stage, now_ns - item_ns)
            if replica.passed:
                await dispatcher.release(replica)
                now_ns = perf_counter_ns()
            worked_ns += now_ns - item_ns
            items += 1
            if outcome == "failed" or self._is_over(replica):
                ended = "gone"
            elif not replica.waiting:
                ended = "empty"
            elif outcome == "routable":
                ended = "routable"
            elif items >= limit:
                ended = at_limit
            elif worked_ns >= self._max_time_ns:
                ended = "time"
            elif now_ns - wakeup.ended_ns >= _YIELD_AFTER_NS:
                await wakeup.yield_turns()
                now_ns = perf_counter_ns()
                now_decided = order.decide(stage) or decision
                if self._is_over(replica):
                    ended = "gone"
                elif now_decided.stage is not stage or now_decided.due:
                    ended = "outranked"
        order.pass_ended(decision)
        self._note_pass(replica, items, ended, now_ns - started_ns)
        if now_ns - wakeup.ended_ns >= _YIELD_AFTER_NS and self._members.has_backlog():  # else the loop sleeps now
            await wakeup.yield_turns()

    def _is_over(self, replica: QueuedReplica) -> bool:
        """Whether to take no more from a replica, because it is gone, the server shuts down or this patch failed."""
        return self._shutdown.is_set() or replica.is_gone() or self._runtime.has_failed

    def _note_pass(self, replica: QueuedReplica, items: int, ended: str, duration_ns: int) -> None:
        if ended == "gone":
            self._members.stale = True
        if not items:
            return
        counters = self._counters
        counters["items"] += items
        counters["passes"] += 1
        if f"ended_{ended}" in counters:
            counters[f"ended_{ended}"] += 1
        if self._on_pass_end is not None:
            report = PassReport(*replica.slot, items, ended, len(replica.waiting), duration_ns / 1000)
            self._on_pass_end(report=report)
