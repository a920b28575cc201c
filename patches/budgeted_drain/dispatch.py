"""One raw output: taken from a replica, and put through all of upstream's handling.

All processing is upstream's (``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``). Here is decided what of it must
wait (``held_ends.py``), and whether it is routable. When, and from which replica, is the loop's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import msgspec

from omni_fastpath.hooks.specs import RawOutputView
from omni_fastpath.ledger import logger

from . import upstream
from .failures import Failures
from .held_ends import Dispatch, Extent, HeldEnd, HeldEnds
from .membership import Membership
from .order import NextStage
from .replicas import QueuedReplica, Replica, Stage

POLL_WAIT_S = 0.001
"""Upstream's cadence for what can only be polled: diffusion stages and clients without an output queue."""

Outcome = Literal["nothing", "unreadable", "failed", "dropped", "dispatched", "routable"]
"""What became of one attempt to take a raw output.

``nothing``: none was there. ``unreadable``: reading it raised, and that was handled; it counts as none. ``failed``:
processing it raised, and that was handled. ``dropped``: nothing of it went on, as upstream's rule drops what has no
content and an end may be held.
``dispatched``: it went through all of upstream's handling. ``routable``: the same, and it ends a pass.
"""


class Hooks(NamedTuple):
    """What plugins decide and observe; None where none does.

    Attributes:
        is_routable: Whether a processed raw output is routable; an exception counts as "yes".
        next_stage: The choice of the next stage.
        on_dequeued: See ``hooks/specs.py``, as the others.
    """

    is_routable: Callable[[RawOutputView], bool]
    next_stage: NextStage | None = None
    on_dequeued: Callable[..., Any] | None = None
    on_pass_end: Callable[..., Any] | None = None
    on_routed: Callable[..., Any] | None = None


class _OneItemClient:
    """A client that has just one raw output: how one that is already taken passes through upstream's reading.

    One for all: upstream asks at once, and one raw output is taken at a time.
    """

    item: Any = None

    async def get_output_async(self) -> Any:
        item, self.item = self.item, None
        return item


class Dispatcher:
    """Takes raw outputs and dispatches them, less what must wait.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        members: The replicas that there are.
        held_ends: What is held.
        hooks: What plugins decide and observe.
        counters: The patch's counters.
        numbers: The count that numbers all arrivals.
        charge: Told of which stage something held was, and how many nanoseconds its processing took.
    """

    def __init__(
        self,
        orchestrator: Any,
        members: Membership,
        held_ends: HeldEnds,
        hooks: Hooks,
        counters: dict[str, int],
        numbers: Iterator[int],
        charge: Callable[[Stage, int], None],
    ) -> None:
        self._orchestrator = orchestrator
        self._members = members
        self._held_ends = held_ends
        self._failures = Failures(orchestrator, members, held_ends, numbers)
        self._hooks = hooks
        self._counters = counters
        self._numbers = numbers
        self._charge = charge
        self._one = _OneItemClient()

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
            await self._failures.handle(replica, error)
            return "unreadable"
        if raw_outputs is None:
            return "nothing"
        if self._held_ends or self._waits_elsewhere(replica.stage):
            self._hold_ends_of(replica, raw_outputs)
        return await self._read_and_dispatch(replica, raw_outputs, judge=judge)

    async def poll(self, replica: Replica) -> bool:
        """Take one output of a replica that can only be polled, as upstream polls it; whether there was something."""
        if replica.pool.stage_type == "diffusion":
            return await self._poll_diffusion(replica)
        reading = replica.pool.poll_llm_raw_output(replica.slot[1], timeout_s=POLL_WAIT_S)
        return await self._dispatch(replica, reading) != "dropped"

    async def release(self, replica: QueuedReplica, number: float) -> None:
        """Dispatch what may go now that all below a number is dispatched, or lost, at a replica."""
        for end in self._held_ends.passed(replica, number):
            await end.dispatch()

    # ---- Holding ----

    def _waits_elsewhere(self, stage: Stage) -> bool:
        """Whether anything waits at another stage."""
        for other in self._members.stages:  # noqa: SIM110 - as in Stage.has_backlog
            if other is not stage and other.has_backlog():
                return True
        return False

    def _hold_ends_of(self, replica: QueuedReplica, raw_outputs: Any) -> None:
        """Take out of a raw output the entries that must wait, and hold them; the rest goes on at once."""
        kept = []
        holding = bool(self._held_ends)  # asked once: most raw outputs have no end, and nothing is held
        for entry in raw_outputs.outputs:
            ends = entry.finish_reason is not None and not getattr(entry, "is_segment_finished", False)
            if ends or (holding and entry.request_id in self._held_ends):
                failed = entry.finish_reason == upstream.FinishReason.ERROR
                dispatch = partial(self._dispatch_entry, replica, raw_outputs, entry)
                if self._hold(replica, replica.taken, entry.request_id, dispatch, ends=ends, failed=failed):
                    holding = True
                    continue
            kept.append(entry)
        if len(kept) < len(raw_outputs.outputs):
            raw_outputs.outputs = kept

    def _hold(
        self, replica: Replica, number: int, request_id: str, dispatch: Dispatch, *, ends: bool, failed: bool
    ) -> bool:
        """Hold the end of a request, or what follows a held one, if something goes before it; whether it is held."""
        state = self._orchestrator.request_states.get(request_id)
        if state is None:  # it has ended: upstream drops what is left of it
            return False
        extent: Extent = "nowhere"
        overwritten_by: frozenset[int] = frozenset()
        if ends and (failed or state.streaming.enabled):
            extent = "everywhere"
        elif ends:
            extent = "before"
            if upstream.KEEPS_LAST_MESSAGE:
                wanted = state.final_output_stage_ids or {state.final_stage_id}
                overwritten_by = frozenset(
                    stage.stage_id
                    for stage in self._members.stages
                    if stage.stage_id < replica.slot[0] and stage.final_output and stage.stage_id not in wanted
                )
        end = HeldEnd(number, replica.slot, frozenset((request_id,)), extent, dispatch, failed, overwritten_by)
        is_held = self._held_ends.hold(end)
        self._counters["held"] += is_held
        return is_held

    async def _dispatch_entry(self, replica: QueuedReplica, raw_outputs: Any, entry: Any) -> None:
        """Dispatch an entry that was held; its stage pays. Statistics and finished ids went with the rest."""
        started_ns = perf_counter_ns()
        alone = msgspec.structs.replace(raw_outputs, outputs=[entry], scheduler_stats=None, finished_requests=None)
        await self._read_and_dispatch(replica, alone)
        self._charge(replica.stage, perf_counter_ns() - started_ns)

    # ---- Raw outputs of LLM stages ----

    def _read_and_dispatch(
        self, replica: QueuedReplica, raw_outputs: Any, *, judge: bool = False
    ) -> Awaitable[Outcome]:
        """Dispatch a raw output that is already taken: upstream's keep-or-drop rule and rehydration read it again."""
        self._one.item = raw_outputs
        return self._dispatch(replica, upstream.read(replica.pool, self._one), judge=judge)

    async def _dispatch(self, replica: Replica, reading: Awaitable[Any], *, judge: bool = False) -> Outcome:
        """Put the raw output that ``reading`` gives through all of upstream's handling."""
        orchestrator, (stage_id, replica_id) = self._orchestrator, replica.slot
        terminal_ids: set[str] = set()
        try:
            raw = await reading
            if raw is None:
                return "dropped"
            if self._hooks.on_dequeued is not None:
                self._hooks.on_dequeued(stage_id=stage_id, replica_id=replica_id, raw_outputs=raw)
            processed = await orchestrator._process_llm_stage_outputs(stage_id, replica_id, raw, terminal_ids)
        except BaseException as error:
            await self._failures.handle(replica, error)
            return "failed"
        # Before routing, which forgets a request that ends.
        routable = judge and self._judge(replica, raw, processed)
        await orchestrator._handle_processed_outputs(stage_id, replica_id, processed)
        await orchestrator._finish_raw_terminal_requests(stage_id, replica_id, terminal_ids)
        self._note_routed(replica, processed)
        return "routable" if routable else "dispatched"

    def _judge(self, replica: Replica, raw: Any, processed: list[Any]) -> bool:
        try:
            return self._hooks.is_routable(
                RawOutputView(*replica.slot, True, raw, processed, self._orchestrator.request_states)
            )
        except Exception:
            # Ending the pass loses nothing; the next output is judged afresh.
            if not self._counters["judge_errors"]:
                logger.exception("omni-fastpath: judging a raw output failed; such an output ends its pass")
            self._counters["judge_errors"] += 1
            return True

    def _note_routed(self, replica: Replica, processed: list[Any]) -> None:
        if self._hooks.on_routed is not None:
            for output in processed:
                self._hooks.on_routed(stage_id=replica.slot[0], replica_id=replica.slot[1], output=output)

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
            await self._failures.handle(replica, error)
            return True
        failed = getattr(output, "error", None) is not None
        ends = failed or output.finished
        route = partial(self._route_diffusion, replica, output)
        if not (ends or output.request_id in self._held_ends) or not self._hold(
            replica, next(self._numbers), output.request_id, route, ends=ends, failed=failed
        ):
            await route()
        return True

    async def _route_diffusion(self, replica: Replica, output: Any) -> None:
        """A diffusion stage's output through upstream's routing."""
        if not upstream.is_diffusion_start(output):
            replica.pool.record_output_timestamps([output])
        await self._orchestrator._handle_processed_outputs(*replica.slot, [output])
        self._note_routed(replica, [output])
