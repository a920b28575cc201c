"""Takes a raw output from a replica and runs all of upstream's handling on it.

All processing is upstream's (``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``), step by step (``work.py``). This
file decides which parts must wait (``held_ends.py``). The loop decides when something is taken, and from which replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import inf
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, Literal

import msgspec

from omni_fastpath.hooks import HOOKS, RawOutputView
from omni_fastpath.ledger import Entry, logger, raised_by_us

from . import upstream
from .held_ends import HeldEnd, HeldEnds
from .membership import Membership
from .replicas import Arrival, QueuedReplica, Replica, Stage
from .routable import is_routable
from .work import Death, DiffusionOutput, Work

POLL_WAIT_S = 0.001
"""Upstream's interval for replicas that can only be polled: of diffusion stages, and without an output queue."""

Outcome = Literal["nothing", "failed", "dropped", "dispatched", "routable"]
"""The result of one attempt to take a raw output.

``nothing``: the queue had no raw output, or it had an exception, which was handled. ``failed``: processing raised an
exception, which was handled. ``dropped``: nothing of it was dispatched, because upstream's rule drops an output
without content and an end may be held. ``dispatched``: all of upstream's handling is done. ``routable``: the same,
and the output ends a pass.
"""


class Dispatcher:
    """Takes raw outputs and dispatches them, except for those that must wait.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        members: The current replicas.
        runtime: The patch in this process.
        charge: Called with the stage of a held end and the nanoseconds that its processing took.

    Attributes:
        held_ends: The held ends.
        works: Everything that was taken and is not finished, in the order of taking. The values have no meaning.
    """

    def __init__(
        self,
        orchestrator: Any,
        members: Membership,
        runtime: Entry,
        charge: Callable[[Stage, int], None],
    ) -> None:
        self._orchestrator = orchestrator
        self._members = members
        self.held_ends = HeldEnds(members)
        self.works: dict[Work, None] = {}
        self._at: Replica | None = None  # of which something was taken or dispatched last
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._is_routable = HOOKS.policy(is_routable)
        self._on_dequeued = HOOKS.observer("on_dequeued")
        self._on_routed = HOOKS.observer("on_routed")
        self._judging = runtime.guard("judging a raw output")
        self._counters = runtime.counters
        self._charge = charge

    # ---- Taking one ----

    async def take_one(self, replica: QueuedReplica, *, judge: bool = False) -> Outcome:
        """Take the next raw output of a replica and dispatch it.

        Args:
            replica: The replica.
            judge: Whether to determine if the output is routable.
        """
        arrivals = replica.arrivals
        if len(arrivals) != len(replica.waiting):
            replica.follow_queue()  # other code has put or taken items
        if not arrivals:
            return "nothing"
        outcome: Outcome = "nothing"
        work = self._begin(Work(self._orchestrator, replica, arrivals[0].number))
        try:
            work.raw.append(replica.dequeue())
        except Exception as error:
            await self._handle_failure(replica, error)
        else:
            replica.pass_first()
            self._split(work)
            outcome = await self._dispatch(work, judge=judge)
        del self.works[work]
        return outcome

    async def poll(self, replica: Replica) -> bool:
        """Poll a replica that can only be polled, as upstream does, and return whether it had an output."""
        pool, replica_id, number = replica.pool, replica.slot[1], next(self._members.numbers)
        is_diffusion = pool.stage_type == "diffusion"
        work = self._begin((DiffusionOutput if is_diffusion else Work)(self._orchestrator, replica, number))
        try:
            if is_diffusion:
                work.raw.append(pool.poll_diffusion_output(replica_id))
            else:
                work.raw.append(await pool.poll_llm_raw_output(replica_id, timeout_s=POLL_WAIT_S))
        except Exception as error:
            await self._handle_failure(replica, error)
            found = True
        else:
            output = work.raw[0]
            found = output is not None
            if found and is_diffusion:
                failed = getattr(output, "error", None) is not None
                end = self._end_of(work, output.request_id, ends=failed or output.finished, failed=failed)
                if end is not None and (blocker := self.held_ends.blocker(end)) is not None:
                    self._hold(end, blocker)
                    return True
            await self._dispatch(work)
        del self.works[work]
        return found

    async def release(self, replica: QueuedReplica) -> None:
        """Dispatch the ends that waited for arrivals of a replica, and charge their stages."""
        for end in self.held_ends.release(replica):
            started_ns = perf_counter_ns()
            await self._dispatch(end.work)
            del self.works[end.work]
            self._charge(end.work.replica.stage, perf_counter_ns() - started_ns)

    def _begin(self, work: Work) -> Work:
        self._at = work.replica
        self.works[work] = None
        return work

    # ---- Holding ----

    def _split(self, work: Work) -> None:
        """Move the entries of a raw output that must wait to separate works, and hold those."""
        for entry in work.raw[0].outputs:
            finish = entry.finish_reason
            if finish is None and entry.request_id not in self.held_ends:
                continue
            part = Work(self._orchestrator, work.replica, work.number)
            ends = finish is not None and not getattr(entry, "is_segment_finished", False)
            end = self._end_of(part, entry.request_id, ends=ends, failed=finish == upstream.FinishReason.ERROR)
            if end is None or (blocker := self.held_ends.blocker(end)) is None:
                continue
            # Statistics and finished ids go at once. A held entry keeps only itself in memory.
            raw, replace = work.raw[0], msgspec.structs.replace
            rest = replace(raw, outputs=[each for each in raw.outputs if each is not entry])
            work.raw[:] = rest, replace(raw, outputs=[entry], scheduler_stats=None, finished_requests=None)
            self.works[part] = None
            part.raw.append(work.raw.pop())
            self._hold(end, blocker)

    def _hold(self, end: HeldEnd, blocker: Arrival | HeldEnd) -> None:
        self.works[end.work] = None
        self.held_ends.hold(end, blocker)
        self._counters["held"] += 1

    def _end_of(self, work: Work, request_id: str, *, ends: bool, failed: bool) -> HeldEnd | None:
        """An end of a request, or what follows a held end, to be held if it has a blocker. None for other outputs."""
        state = self._orchestrator.request_states.get(request_id)
        if state is None or not (ends or request_id in self.held_ends):
            return None  # without a state the request has ended, and upstream drops the rest of it
        limits = self._limits(work.replica.stage, work.number, state, failed=failed) if ends else {}
        return HeldEnd(work, frozenset((request_id,)), limits, failed=failed)

    def _limits(self, stage: Stage, number: float, state: Any, *, failed: bool) -> dict[int, float]:
        """Return, by stage, the number below which queued outputs are dispatched before an end.

        It is an end at ``stage`` or of the whole request. An error ends the request, and so does the end of a session,
        which the stage that ends last reports. Text of a stage that was not requested is dispatched first whenever it
        arrives, because upstream would overwrite this message with it. That does not delay the message, because
        upstream sends it only when the earlier stages have ended.
        """
        stages = self._members.stages
        if failed or state.streaming.enabled:
            return {each.stage_id: number for each in stages}
        asked = state.final_output_stage_ids or {state.final_stage_id}
        limits: dict[int, float] = {}
        for each in stages[: stage.stage_id]:
            overwrites = upstream.KEEPS_LAST_MESSAGE and each.final_output and each.stage_id not in asked
            limits[each.stage_id] = inf if overwrites else number
        return limits

    # ---- Dispatching ----

    async def _dispatch(self, work: Work, *, judge: bool = False) -> Outcome:
        """Run all of upstream's handling on what was taken."""
        self._at = replica = work.replica
        try:
            if not await work.read():
                return "dropped"
            raw = work.raw[0]
            if self._on_dequeued is not None and type(work) is Work:
                self._on_dequeued(stage_id=replica.slot[0], replica_id=replica.slot[1], raw_outputs=raw)
            made = await work.process()
        except Exception as error:
            await self._handle_failure(replica, error)
            return "failed"
        routable = False
        if judge:  # before routing, which forgets a request that ends
            with self._judging:
                view = RawOutputView(*replica.slot, True, raw, made, self._orchestrator.request_states)
                routable = self._is_routable(view)
        await work.finish()
        if self._on_routed is not None:
            for output in made:
                self._on_routed(stage_id=replica.slot[0], replica_id=replica.slot[1], output=output)
        return "routable" if routable else "dispatched"

    # ---- Exceptions: upstream's rule, but a replica's death waits for earlier arrivals ----

    async def _handle_failure(self, replica: Replica, error: Exception) -> None:
        """Handle an exception as upstream's loops do: evict a dead replica, ignore it during shutdown, else raise it.

        Raises:
            Exception: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, upstream.EngineDeadError):
            await self._died(replica, error)
        elif not self._shutdown.is_set():
            if not raised_by_us(error):
                logger.error("omni-fastpath: processing of stage-%s replica-%s failed", *replica.slot, exc_info=error)
            raise error

    async def _died(self, replica: Replica, error: Exception) -> None:
        """Let upstream evict a dead replica and fail its requests after their earlier outputs are dispatched.

        Until then the replica keeps its bindings, because upstream finds the requests to fail by them. It is not
        selected, so that it gets no new request. But ``pick`` of a distributed pool asks only the hub.
        """
        pool, replica_id = replica.pool, replica.slot[1]
        if not replica.is_in_slot():
            return  # the slot has another client now, or the death was handled before
        death = Death(self._orchestrator, replica, next(self._members.numbers), error)
        limits = dict.fromkeys((stage.stage_id for stage in self._members.stages), death.number)
        end = HeldEnd(death, frozenset(death.stranded), limits, failed=True)
        blocker = self.held_ends.blocker(end)
        if blocker is None:
            await death.finish()
            return
        self._hold(end, blocker)
        pool._unavailable_replicas.add(replica_id)
        self._members.stale = True

    # ---- After an exception in this patch ----

    async def finish(self, interrupted: BaseException | None) -> None:
        """Finish all works, and dispatch what is queued, in the order of arrival.

        The rest of this patch may not work any more. Outputs that have no number yet are left to upstream's loop.

        Args:
            interrupted: An exception of upstream that was being handled.
        """
        died = self._at if isinstance(interrupted, upstream.EngineDeadError) else None
        if died is not None and died.is_in_slot():
            died.pool._unavailable_replicas.add(died.slot[1])  # it gets no request until it is evicted
        for work in sorted([*self.works, *self._take_waiting()], key=attrgetter("number")):
            try:
                await work.finish()
            except upstream.EngineDeadError as error:
                await self._evict(work.replica, error)
            except Exception as error:
                if not raised_by_us(error):
                    raise
                logger.exception("omni-fastpath: an output of stage-%s replica-%s is lost", *work.replica.slot)
        if died is not None:
            await self._evict(died, interrupted)
        elif isinstance(interrupted, Exception) and not raised_by_us(interrupted):
            raise interrupted

    def _take_waiting(self) -> Iterator[Work]:
        """Take queued outputs that have a number. An exception and the outputs after it are left to upstream's loop."""
        for replica in self._members.queued():
            queue = replica.client.outputs_queue
            for arrival in replica.arrivals if not replica.is_gone() else ():
                if queue.qsize() and queue._queue[0] is arrival.item and not isinstance(arrival.item, Exception):
                    work = Work(self._orchestrator, replica, arrival.number)
                    work.raw.append(queue.get_nowait())
                    yield work

    async def _evict(self, replica: Replica, error: Any) -> None:
        if replica.is_in_slot():
            await self._orchestrator._handle_dead_replica(*replica.slot, error)
