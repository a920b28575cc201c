"""The loop that replaces both of the orchestrator's loops: all replicas share one line in the order of arrival.

One ``Drain`` serves one orchestrator until shutdown, on the orchestrator's thread. It sleeps until a raw output
arrives, and takes what arrived first through upstream's own functions, one raw output at a time (``work.py``). After a
budget of raw outputs or of time the loop yields, so that sockets are read and requests are submitted. As in Linux NAPI,
a counter for each limit counts the passes that ended on it.

A place in the line is a replica: each put into its queue takes one. A replica that can only be polled takes a place
for each poll. Under overload a first audio would wait behind all text, so every other raw output is one that need not
wait, if there is any: of a later stage whose outputs users receive, which is audio as a rule. One in which a request
ends waits for its place, and so does what its replica sent afterwards. So a request's end is behind everything of the
request that arrived earlier, and the raw outputs of each replica stay in order.

After an exception at any line of this patch, upstream's loop replaces this one (``Drain.run``). Before that, what was
taken is finished from the step that it had reached, and what has a place in the line is dispatched in its order. An
exception in this patch meanwhile may lose the raw output that it was at, and the log says so.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from itertools import count
from time import perf_counter_ns
from typing import Any, ClassVar

from vllm.v1.engine.exceptions import EngineDeadError

from omni_fastpath.guard import raised_by_us
from omni_fastpath.hooks import HOOKS, PassReport
from omni_fastpath.ledger import PatchState, logger

from .replicas import POLL_WAIT_S, QueuedReplica, Replica, ReplicaKey, replica_in
from .wakeup import Wakeup
from .work import Work

REFRESH_EVERY_NS = 500_000_000
"""Longest time between two looks at upstream's pools, half a second, as in upstream's event-driven loop. An attach
causes one at once. So does a replica that is gone, as the drain checks before each raw output."""

IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as in upstream's event-driven loop. It only paces the monitor's idle note and the
looks at the pools, because every arrival, attach and shutdown wakes the loop."""


class Drain:
    """Serves one orchestrator's stages until shutdown, with the hooks that plugins implement when it is created.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        patch: The patch in this process. Its values are read once.
    """

    running: ClassVar[tuple[Drain, ...]] = ()
    """The running loops of this process. It is replaced and never changed, because other threads read it."""

    def __init__(self, orchestrator: Any, patch: PatchState) -> None:
        self._orchestrator, self._patch = orchestrator, patch
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        # What upstream's event-driven loop reports its queued raw outputs to, from 0.30 on.
        gauge = getattr(orchestrator._orch_monitor, "set_dispatch_queue_size", None)
        self._gauge = gauge if orchestrator._event_driven_orch else None
        self._wakeup = Wakeup()
        self._line: OrderedDict[int, Replica] = OrderedDict()  # by number of arrival
        self._early: deque[int] = deque()  # the places whose turn comes early
        self._numbers = count()
        self._is_lines_turn = True
        self._replicas: dict[ReplicaKey, Replica] = {}
        self._polled: list[Replica] = []
        self._in_hand: Work | None = None
        self._is_stale = True  # whether upstream's pools must be looked at now
        self._refresh_ns = self._poll_ns = 0
        self._on_dequeued = HOOKS.observer("on_dequeued")
        self._on_routed = HOOKS.observer("on_routed")
        self._on_pass_end = HOOKS.observer("on_pass_end")

    async def run(self, upstreams_loop: Callable[[], Awaitable[None]]) -> None:
        """Dispatch until the orchestrator's shutdown event is set.

        After an exception in this patch upstream's loop serves the same clients. Exceptions of upstream propagate as
        from its own loops.

        Args:
            upstreams_loop: The loop that this one replaces.
        """
        interrupted: BaseException | None = None
        outside = sys.exc_info()[1]  # what the caller is handling, which would be a context too
        Drain.running = (*Drain.running, self)
        try:
            await self._serve()
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._patch.fail("the drain", error)
            interrupted = error.__context__ if error.__context__ is not outside else None
        finally:
            Drain.running = tuple(loop for loop in Drain.running if loop is not self)
            for replica in self._replicas.values():
                replica.leave()
        if self._patch.has_failed and not self._shutdown.is_set():
            await self._hand_over(interrupted)
            await upstreams_loop()

    async def _serve(self) -> None:
        """Dispatch until shutdown, or until this patch has failed somewhere else."""
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._wakeup.wake())
        try:
            while not self._is_over():
                now_ns = perf_counter_ns()
                if self._is_stale or now_ns >= self._refresh_ns:
                    self._refresh(now_ns)
                if self._polled and now_ns >= self._poll_ns:
                    self._queue_polls(now_ns)
                items = await self._pass() if self._line else 0
                self._orchestrator._orch_monitor.note_loop(idle=not items)
                if self._line or items:
                    await self._wakeup.yield_turns()
                elif not self._shutdown.is_set() and not self._is_stale:
                    await self._wakeup.sleep(POLL_WAIT_S if self._polled else IDLE_WAIT_S)
        finally:
            shutdown.cancel()

    def _is_over(self) -> bool:
        """Whether to take nothing more, because the server shuts down or this patch failed."""
        return self._shutdown.is_set() or self._patch.has_failed

    # ---- The line ----

    def _arrived(self, replica: QueuedReplica, item: Any) -> None:
        """Notice a put. Never raises, because vLLM's reader would take an exception for a failure of the engine.

        The place comes first, so that whatever fails afterwards, the line has everything that arrived, in order. After
        a failure nothing gets a place, so that all with a place arrived before all without one.
        """
        try:
            number = next(self._numbers)
            if not self._patch.has_failed:
                self._line[number] = replica
            self._wakeup.wake()
            # Only if users also receive the first stage's outputs, which is the text that audio would wait behind.
            if self._orchestrator.stage_pools[0].final_output and replica.may_go_early(item):
                replica.early += 1
                self._early.append(number)
            self._report_backlog()
        except Exception as error:
            self._patch.fail("noticing an arrival", error)

    def _report_backlog(self) -> None:
        """Report the number of queued raw outputs to upstream's monitor, as its event-driven loop does."""
        if self._gauge is not None:
            self._gauge(len(self._line))

    def _queue_polls(self, now_ns: int) -> None:
        """Let each replica that can only be polled be polled when its turn comes."""
        self._poll_ns = now_ns + int(POLL_WAIT_S * 1e9)
        for replica in self._polled:
            if not replica.is_in_line:
                replica.is_in_line = True
                self._line[next(self._numbers)] = replica

    def attached(self) -> None:
        """Note that a client was attached. May be called on any thread."""
        self._is_stale = True
        self._wakeup.wake_from_any_thread()

    def _refresh(self, now_ns: int) -> None:
        """Look for replicas that joined or left upstream's pools."""
        self._is_stale = False  # first, because an attach on another thread may set it meanwhile
        self._refresh_ns = now_ns + REFRESH_EVERY_NS
        for key, replica in list(self._replicas.items()):
            if replica.is_gone():
                replica.leave()
                del self._replicas[key]
        for stage_id, pool in enumerate(self._orchestrator.stage_pools):
            for replica_id in pool.available_replica_ids():
                key = stage_id, replica_id
                if key not in self._replicas:
                    replica = self._replicas[key] = replica_in(pool, key)
                    replica.join(self._arrived)
        self._polled = [each for each in self._replicas.values() if not isinstance(each, QueuedReplica)]

    # ---- Taking ----

    async def _pass(self) -> int:
        """Dispatch from the line within the budget, and return the number of raw outputs."""
        line, items, ended = self._line, 0, ""
        began_ns = now_ns = perf_counter_ns()
        while line and not ended:
            if items >= self._patch.options.max_items:
                ended = "items"
            elif now_ns - began_ns >= self._patch.options.max_time_us * 1000:
                ended = "time"
            elif self._is_over():
                ended = "over"
            else:
                self._is_lines_turn = not (self._is_lines_turn and self._early)
                items += await self._take(next(iter(line if self._is_lines_turn else self._early)))
                now_ns = perf_counter_ns()
        if items:
            ended = ended or "empty"
            self._patch.counters["items"] += items
            if ended != "over":
                self._patch.counters[f"ended_{ended}"] += 1
            if self._on_pass_end is not None:
                self._on_pass_end(report=PassReport(items, ended, len(line), (now_ns - began_ns) / 1000))
        self._report_backlog()
        return items

    async def _take(self, place: int) -> bool:
        """Take the raw output of a place in the line, and run all of upstream's handling on it.

        Returns:
            Whether there was one. An exception that was handled counts.
        """
        replica = self._line[place]
        replica.is_in_line = False
        if replica.early:
            replica.early -= 1
            self._early.remove(place)
        if replica.is_gone():
            del self._line[place]
            self._is_stale = True
            return False
        work = replica.work(self._orchestrator, replica)
        # In one line, so that after an exception each queued raw output has either a place or the work in hand.
        self._in_hand, _ = work, self._line.pop(place)
        try:
            found = await work.take()
            if found and not isinstance(replica, QueuedReplica):
                self._poll_ns = 0  # there may be another one
            if not await work.read():
                return found
            if self._on_dequeued is not None and type(work) is Work:
                self._on_dequeued(stage_id=replica.key[0], replica_id=replica.key[1], raw_outputs=work.raw[0])
            made = await work.process()
        except Exception as error:
            await self._handle_failure(replica, error)
            return True
        await work.finish()
        if self._on_routed is not None:
            for output in made:
                self._on_routed(stage_id=replica.key[0], replica_id=replica.key[1], output=output)
        return True

    async def _handle_failure(self, replica: Replica, error: Exception) -> None:
        """Handle an exception as upstream's loops do: evict a dead replica, ignore it during shutdown, else raise it.

        Raises:
            Exception: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, EngineDeadError):
            self._is_stale = True
            await self._evict(replica, error)
        elif not self._shutdown.is_set():
            if not raised_by_us(error):
                logger.error("omni-fastpath: processing of stage-%s replica-%s failed", *replica.key, exc_info=error)
            raise error

    async def _evict(self, replica: Replica, error: Any) -> None:
        if replica.is_in_pool():  # else another client is there by now, or the death was handled before
            await self._orchestrator._handle_dead_replica(*replica.key, error)

    # ---- After an exception in this patch ----

    async def _hand_over(self, interrupted: BaseException | None) -> None:
        """Finish what was taken, and dispatch what has a place in the line. The rest is left to upstream's loop.

        Args:
            interrupted: What was being handled when this patch raised its own exception. If it is upstream's, it is
                raised again, unless it says that an engine died.
        """
        works = [each.work(self._orchestrator, each) for each in self._line.values() if isinstance(each, QueuedReplica)]
        if (in_hand := self._in_hand) is not None:
            works.insert(0, in_hand)
            if isinstance(interrupted, EngineDeadError):
                await self._evict(in_hand.replica, interrupted)
            elif isinstance(interrupted, Exception) and not raised_by_us(interrupted):
                raise interrupted
        for work in works:
            try:
                if work.is_taken or (not work.replica.is_gone() and await work.take()):
                    await work.finish()
            except EngineDeadError as error:
                await self._evict(work.replica, error)
            except Exception as error:
                if not raised_by_us(error):
                    raise
                logger.exception("omni-fastpath: an output of stage-%s replica-%s is lost", *work.replica.key)
