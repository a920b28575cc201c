"""One raw output: taken from a replica, and put through all of upstream's handling.

All processing is upstream's (``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``). Here is decided what of it must
wait (``held_ends.py``), and whether it is routable. When, and from which replica, is the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import msgspec

from omni_fastpath.hooks import HOOKS, RawOutputView
from omni_fastpath.ledger import logger

from . import upstream
from .held_ends import Dispatch, HeldEnd, HeldEnds
from .membership import Membership
from .replicas import QueuedReplica, Replica, Stage
from .routable import is_routable

POLL_WAIT_S = 0.001
"""Upstream's cadence for what can only be polled: diffusion stages and clients without an output queue."""

Outcome = Literal["nothing", "failed", "dropped", "dispatched", "routable"]
"""What became of one attempt to take a raw output.

``nothing``: none was there, or reading it raised, and that was handled. ``failed``: processing it raised, and that was
handled. ``dropped``: nothing of it went on, as upstream's rule drops what has no content and an end may be held.
``dispatched``: it went through all of upstream's handling. ``routable``: the same, and it ends a pass.
"""


class _Taken(NamedTuple):
    """A client that has just one raw output: how one that is already taken passes through upstream's reading."""

    item: Any

    async def get_output_async(self) -> Any:
        return self.item


class Dispatcher:
    """Takes raw outputs and dispatches them, less what must wait.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        members: The replicas that there are.
        counters: The patch's counters.
        charge: Told of which stage something held was, and how many nanoseconds its processing took.

    Attributes:
        held_ends: What is held.
    """

    def __init__(
        self,
        orchestrator: Any,
        members: Membership,
        counters: dict[str, int],
        charge: Callable[[Stage, int], None],
    ) -> None:
        self._orchestrator = orchestrator
        self._members = members
        self.held_ends = HeldEnds(members)
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._is_routable = HOOKS.policy(is_routable)
        self._on_dequeued = HOOKS.observer("on_dequeued")
        self._on_routed = HOOKS.observer("on_routed")
        self._counters = counters
        self._charge = charge

    # ---- Taking one ----

    async def take_one(self, replica: QueuedReplica, *, judge: bool = False) -> Outcome:
        """Take the next raw output of a replica and dispatch it.

        Args:
            replica: Where from.
            judge: Whether to ask if it is routable.
        """
        try:
            raw_outputs = replica.take()
        except Exception as error:
            logger.exception("omni-fastpath: reading from stage-%s replica-%s failed", *replica.slot)
            await self._handle_failure(replica, error)
            return "nothing"
        if raw_outputs is None:
            return "nothing"
        entries = raw_outputs.outputs
        if self.held_ends or any(entry.finish_reason is not None for entry in entries):
            kept = [entry for entry in entries if not self._is_held(replica, raw_outputs, entry)]
            if len(kept) < len(entries):
                raw_outputs.outputs = kept
        return await self._dispatch(replica, upstream.read(replica.pool, _Taken(raw_outputs)), judge=judge)

    async def poll(self, replica: Replica) -> bool:
        """Take one output of a replica that can only be polled, as upstream polls it; whether there was something."""
        if replica.pool.stage_type == "diffusion":
            return await self._poll_diffusion(replica)
        reading = replica.pool.poll_llm_raw_output(replica.slot[1], timeout_s=POLL_WAIT_S)
        return await self._dispatch(replica, reading) != "dropped"

    async def release(self, replica: QueuedReplica) -> None:
        """Dispatch the ends that may go after what was taken from a replica, or lost with it."""
        for end in self.held_ends.passed(replica):
            await end.dispatch()

    # ---- Holding ----

    def _is_held(self, replica: QueuedReplica, raw_outputs: Any, entry: Any) -> bool:
        """Hold an entry of a raw output if it must wait; whether it must."""
        ends = entry.finish_reason is not None and not getattr(entry, "is_segment_finished", False)
        if not ends and entry.request_id not in self.held_ends:
            return False
        failed = entry.finish_reason == upstream.FinishReason.ERROR
        dispatch = partial(self._dispatch_entry, replica, raw_outputs, entry)
        return self._hold(replica, replica.taken, entry.request_id, dispatch, ends=ends, failed=failed)

    def _hold(
        self, replica: Replica, number: int, request_id: str, dispatch: Dispatch, *, ends: bool, failed: bool
    ) -> bool:
        """Hold the end of a request, or what follows a held one, if something goes before it; whether it is held."""
        state = self._orchestrator.request_states.get(request_id)
        if state is None:  # it has ended: upstream drops what is left of it
            return False
        limits = self._limits(replica.stage, number, state, failed=failed) if ends else {}
        end = HeldEnd(number, replica.slot, frozenset((request_id,)), limits, dispatch, failed)
        is_held = self.held_ends.hold(end)
        self._counters["held"] += is_held
        return is_held

    def _limits(self, stage: Stage, number: int, state: Any, *, failed: bool) -> dict[int, float]:
        """Below which number what waits at a stage goes before an end of ``stage``, or of the whole request.

        An error and a session's end, which comes at whichever stage ends last, end the request. Text of a stage that
        was not asked for goes first whenever it comes: at upstream it would overwrite this message, which upstream
        sends when the stages before have ended, so that it is not later.
        """
        stages = self._members.stages
        if failed or state.streaming.enabled:
            return {each.stage_id: number for each in stages}
        asked = state.final_output_stage_ids or {state.final_stage_id}
        limits: dict[int, float] = {}
        for each in stages[: stage.stage_id]:
            overwrites = upstream.KEEPS_LAST_MESSAGE and each.final_output and each.stage_id not in asked
            limits[each.stage_id] = math.inf if overwrites else number
        return limits

    async def _dispatch_entry(self, replica: QueuedReplica, raw_outputs: Any, entry: Any) -> None:
        """Dispatch an entry that was held; its stage pays. Statistics and finished ids went with the rest."""
        started_ns = perf_counter_ns()
        alone = msgspec.structs.replace(raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None)
        await self._dispatch(replica, upstream.read(replica.pool, _Taken(alone)))
        self._charge(replica.stage, perf_counter_ns() - started_ns)

    # ---- Raw outputs of LLM stages ----

    async def _dispatch(self, replica: Replica, reading: Awaitable[Any], *, judge: bool = False) -> Outcome:
        """Put the raw output that ``reading`` gives through all of upstream's handling."""
        orchestrator, (stage_id, replica_id) = self._orchestrator, replica.slot
        terminal_ids: set[str] = set()
        try:
            raw = await reading
            if raw is None:
                return "dropped"
            if self._on_dequeued is not None:
                self._on_dequeued(stage_id=stage_id, replica_id=replica_id, raw_outputs=raw)
            processed = await orchestrator._process_llm_stage_outputs(stage_id, replica_id, raw, terminal_ids)
        except BaseException as error:
            await self._handle_failure(replica, error)
            return "failed"
        # Before routing, which forgets a request that ends.
        routable = judge and self._judge(replica, raw, processed)
        await orchestrator._handle_processed_outputs(stage_id, replica_id, processed)
        await orchestrator._finish_raw_terminal_requests(stage_id, replica_id, terminal_ids)
        self._note_routed(replica, processed)
        return "routable" if routable else "dispatched"

    def _judge(self, replica: Replica, raw: Any, processed: list[Any]) -> bool:
        try:
            return self._is_routable(
                RawOutputView(*replica.slot, True, raw, processed, self._orchestrator.request_states)
            )
        except Exception:
            # Ending the pass loses nothing; the next output is judged afresh.
            if not self._counters["judge_errors"]:
                logger.exception("omni-fastpath: judging a raw output failed; such an output ends its pass")
            self._counters["judge_errors"] += 1
            return True

    def _note_routed(self, replica: Replica, processed: list[Any]) -> None:
        if self._on_routed is not None:
            for output in processed:
                self._on_routed(stage_id=replica.slot[0], replica_id=replica.slot[1], output=output)

    # ---- Exceptions: upstream's rule, but a replica's death waits for what came before it ----

    async def _handle_failure(self, replica: Replica, error: BaseException) -> None:
        """What upstream's loops do with an exception: evict a dead replica, ignore during shutdown, else give up.

        Raises:
            BaseException: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, upstream.EngineDeadError):
            await self._died(replica, error)
        elif not isinstance(error, Exception):
            raise error
        elif not self._shutdown.is_set():
            logger.error("omni-fastpath: processing of stage-%s replica-%s failed", *replica.slot, exc_info=error)
            raise error

    async def _died(self, replica: Replica, error: Exception) -> None:
        """Let upstream evict a dead replica and fail its requests, after what came of them before.

        Until then the replica keeps its bindings, by which upstream finds the requests to fail, and is left out of the
        selection: it gets no new request, and no other request waits. A distributed pool's ``pick`` asks the hub alone.
        """
        pool, (stage_id, replica_id) = replica.pool, replica.slot
        if pool.clients[replica_id] is not replica.client:
            return  # the death of a client that was replaced is not its successor's, and one death is told once
        survives = any(each != replica_id for each in pool.live_replica_ids())
        submitted = {
            request_id: state
            for request_id, state in self._orchestrator.request_states.items()
            if stage_id in state.stage_submit_ts
        }
        bound = frozenset(each for each in submitted if pool.get_bound_replica_id(each) == replica_id)
        stranded = {each: state for each, state in submitted.items() if each in bound or not survives}
        was_available = bool(pool.is_replica_available(replica_id))
        evict = partial(self._evict, replica, error, stranded, bound, was_available)
        number = next(self._members.numbers)
        limits = {each.stage_id: number for each in self._members.stages}
        end = HeldEnd(number, replica.slot, frozenset(stranded), limits, evict, failed=True)
        if self.held_ends.hold(end):
            pool._unavailable_replicas.add(replica_id)
            self._members.stale = True
        else:
            await self._orchestrator._handle_dead_replica(stage_id, replica_id, error)

    async def _evict(
        self, replica: Replica, error: Exception, stranded: dict[str, Any], bound: frozenset[str], was_available: bool
    ) -> None:
        """Evict the replica of a death that was held. If another client is in its slot, or none, fail its requests.

        Args:
            replica: The replica, with the client that died.
            error: The exception that told of it.
            stranded: The states of the requests, by id, that upstream would have failed when it died.
            bound: Those of them that were bound to it.
            was_available: Whether it is out of the selection because of this death alone.
        """
        pool, (stage_id, replica_id) = replica.pool, replica.slot
        client = pool.clients[replica_id]
        if was_available and (client is None or client is replica.client):
            pool._unavailable_replicas.discard(replica_id)
        if client is replica.client:
            await self._orchestrator._handle_dead_replica(stage_id, replica_id, error)
            return
        if client is not None:  # upstream does not shut down a client that was replaced
            with contextlib.suppress(Exception):
                replica.client.shutdown()
        for request_id, state in stranded.items():
            # By upstream's rule (``_handle_dead_replica``); the requests of another client in the slot are not meant. A
            # detach drops the rows of the coordinator's bindings and fails those requests itself.
            now_at = pool.get_bound_replica_id(request_id)
            lost = request_id in bound and (now_at == replica_id or (now_at is None and client is not None))
            if not lost and pool.live_replica_ids():
                continue
            if self._orchestrator.request_states.get(request_id) is state:  # failing another one may have ended it
                await self._orchestrator._fail_request_dead_stage(request_id, stage_id)

    # ---- Outputs of diffusion stages ----

    async def _poll_diffusion(self, replica: Replica) -> bool:
        """At most one output, handled as upstream's loops do; whether there was one."""
        try:
            output = replica.pool.poll_diffusion_output(replica.slot[1])
            if output is None:
                return False
            if self._orchestrator._absorb_diffusion_metrics(*replica.slot, output):
                return True
        except BaseException as error:
            await self._handle_failure(replica, error)
            return True
        failed = getattr(output, "error", None) is not None
        ends = failed or output.finished
        route = partial(self._route_diffusion, replica, output)
        if not (ends or output.request_id in self.held_ends) or not self._hold(
            replica, next(self._members.numbers), output.request_id, route, ends=ends, failed=failed
        ):
            await route()
        return True

    async def _route_diffusion(self, replica: Replica, output: Any) -> None:
        """A diffusion stage's output through upstream's routing."""
        if not upstream.is_diffusion_start(output):
            replica.pool.record_output_timestamps([output])
        await self._orchestrator._handle_processed_outputs(*replica.slot, [output])
        self._note_routed(replica, [output])
