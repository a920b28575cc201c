"""One raw output: taken from a replica, and put through all of upstream's handling.

All processing is upstream's (``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``). Here is decided what of it must
wait (``overtaking.py``), and whether it brought somebody something. When, and from which replica, is the loop's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

from omni_fastpath.hooks.specs import RawOutputView
from omni_fastpath.ledger import logger

from .failures import Failures
from .membership import Membership
from .overtaking import HeldEnd, HeldEnds, Precedence, Predecessors
from .replicas import QueuedReplica, Replica, Stage

POLL_WAIT_S = 0.001
"""Upstream's cadence for what can only be polled: diffusion stages and clients without an output queue."""

Outcome = Literal["nothing", "unreadable", "failed", "dropped", "dispatched", "routable"]
"""What became of one attempt to take a raw output.

``nothing``: none was there. ``unreadable``: reading it raised, and that was handled; it counts as none. ``failed``:
processing it raised, and that was handled. ``dropped``: it had no content, and upstream's rule drops it.
``dispatched``: it went through all of upstream's handling. ``routable``: the same, and it brings somebody something.
"""


class Observers(NamedTuple):
    """Hooks that somebody implements; None where nobody does."""

    on_dequeued: Callable[..., Any] | None = None
    on_pass_end: Callable[..., Any] | None = None
    on_routed: Callable[..., Any] | None = None


class _OneItemClient:
    """A client that has just one raw output: how one that is already taken passes through upstream's reading.

    One for all: upstream asks at once, and one raw output is taken at a time.
    """

    __slots__ = ("item",)

    def __init__(self) -> None:
        self.item: Any = None

    async def get_output_async(self) -> Any:
        item, self.item = self.item, None
        return item


class Dispatcher:
    """Takes raw outputs and dispatches them, less what must not overtake.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        dequeue: The dequeue that never waits, as a function of the client.
        read: Upstream's reading of a raw output, as a function of the pool and a client.
        is_diffusion_start: Whether a diffusion output only says that its request began.
        members: Who is there.
        held_ends: What is held.
        precedence: What must come before an end.
        failures: What becomes of an exception.
        is_routable: Whether a processed raw output brings somebody something; an exception of its counts as "yes".
        observers: Hooks to call.
        counters: The patch's counters.
        clock: The count that numbers all arrivals.
        charge: Told how many nanoseconds processing something that was held took, and of which stage it was.
    """

    def __init__(
        self,
        orchestrator: Any,
        *,
        dequeue: Callable[[Any], Any],
        read: Callable[[Any, Any], Awaitable[Any]],
        is_diffusion_start: Callable[[Any], bool],
        members: Membership,
        held_ends: HeldEnds,
        precedence: Precedence,
        failures: Failures,
        is_routable: Callable[[RawOutputView], bool],
        observers: Observers,
        counters: dict[str, int],
        clock: Iterator[int],
        charge: Callable[[Stage, int], None],
    ) -> None:
        self._orchestrator = orchestrator
        self._dequeue = dequeue
        self._read = read
        self._is_diffusion_start = is_diffusion_start
        self._members = members
        self._held_ends = held_ends
        self._precedence = precedence
        self._failures = failures
        self._is_routable = is_routable
        self._observers = observers
        self._counters = counters
        self._clock = clock
        self._charge = charge
        self._one = _OneItemClient()

    # ---- Taking one ----

    def take_one(self, replica: QueuedReplica, *, judge: bool = False) -> Awaitable[Outcome]:
        """Take the next raw output of a replica and dispatch it.

        Args:
            replica: Where from.
            judge: Whether to ask if it is routable; else nothing is.
        """
        try:
            raw_outputs = self._dequeue(replica.client)
        except Exception as error:
            logger.exception("omni-fastpath: reading from stage-%s replica-%s failed", *_names(replica))
            replica.arrivals.note_taken()
            return self._unreadable(replica, error)
        replica.arrivals.note_taken()
        if raw_outputs is None:
            return _nothing_there()
        if self._waits_elsewhere(replica.stage) or self._held_ends:
            self._hold_what_must_wait(replica, raw_outputs)
        return self._through_upstream(replica, raw_outputs, judge)

    async def poll(self, replica: Replica) -> bool:
        """Take one output of a replica that can only be polled, as upstream polls it; whether there was something."""
        if replica.pool.stage_type == "diffusion":
            return await self._poll_diffusion(replica)
        reading = replica.pool.poll_llm_raw_output(replica.replica_id, timeout_s=POLL_WAIT_S)
        return await self._dispatch(replica, reading, judge=False) != "dropped"

    async def release(self, ripe: list[HeldEnd]) -> None:
        """Dispatch what was held and may go."""
        for held in ripe:
            await held.dispatch()

    async def _unreadable(self, replica: Replica, error: Exception) -> Outcome:
        await self._failures.handle(replica, error)
        return "unreadable"

    # ---- Raw outputs of LLM stages ----

    def _waits_elsewhere(self, stage: Stage) -> bool:
        """Whether anything waits at another stage."""
        for other in self._members.stages:  # noqa: SIM110 - as in Stage.has_backlog
            if other is not stage and other.has_backlog():
                return True
        return False

    def _hold_what_must_wait(self, replica: QueuedReplica, raw_outputs: Any) -> None:
        """Take out of a raw output what must not overtake, and hold it."""
        try:
            following = self._precedence.split(replica, raw_outputs, self._members.stages, self._held_ends)
        except Exception:
            self._precedence.report_unreadable()
            return
        number = replica.arrivals.taken
        for request_id, alone, predecessors, more in following:
            self._counters["held"] += 1
            held = HeldEnd(number, (request_id,), self._later(replica, alone), replica, more)
            self._held_ends.add(held, predecessors)

    def _later(self, replica: QueuedReplica, raw_outputs: Any) -> Callable[[], Awaitable[None]]:
        """The dispatch of what is held of a raw output; its own stage pays for it."""

        async def dispatch() -> None:
            started_ns = perf_counter_ns()
            await self._through_upstream(replica, raw_outputs, False)
            self._charge(replica.stage, perf_counter_ns() - started_ns)

        return dispatch

    def _through_upstream(self, replica: QueuedReplica, raw_outputs: Any, judge: bool) -> Awaitable[Outcome]:
        """Dispatch a raw output that is already taken: upstream's keep-or-drop rule and rehydration read it again."""
        self._one.item = raw_outputs
        return self._dispatch(replica, self._read(replica.pool, self._one), judge=judge)

    async def _dispatch(self, replica: Replica, reading: Awaitable[Any], *, judge: bool) -> Outcome:
        """Put the raw output that ``reading`` gives through all of upstream's handling."""
        stage_id, replica_id = replica.stage_id, replica.replica_id
        orchestrator = self._orchestrator
        terminal_ids: set[str] = set()
        try:
            raw = await reading
            if raw is None:
                return "dropped"
            if self._observers.on_dequeued is not None:
                self._observers.on_dequeued(stage_id=stage_id, replica_id=replica_id, raw_outputs=raw)
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
            view = RawOutputView(*_names(replica), True, raw, processed, self._orchestrator.request_states)
            return self._is_routable(view)
        except Exception:
            # Ending the pass loses nothing; the next output is judged afresh.
            if not self._counters["judge_errors"]:
                logger.exception("omni-fastpath: judging a raw output failed; such an output ends its pass")
            self._counters["judge_errors"] += 1
            return True

    def _note_routed(self, replica: Replica, processed: list[Any]) -> None:
        if self._observers.on_routed is not None:
            for output in processed:
                self._observers.on_routed(stage_id=replica.stage_id, replica_id=replica.replica_id, output=output)

    # ---- Outputs of diffusion stages ----

    async def _poll_diffusion(self, replica: Replica) -> bool:
        """At most one output, handled as upstream's loops do; whether there was one."""
        try:
            output = replica.pool.poll_diffusion_output(replica.replica_id)
            if output is None:
                return False
            if self._is_only_metrics(replica, output):
                return True
        except BaseException as error:
            await self._failures.handle(replica, error)
            return True
        if not self._hold_diffusion(replica, output):
            await self._route_diffusion(replica, output)
        return True

    def _hold_diffusion(self, replica: Replica, output: Any) -> bool:
        """Hold a diffusion stage's output if it ends its request and more of that came before; whether it is held."""
        failed = getattr(output, "error", None) is not None
        request_id = output.request_id
        state = self._orchestrator.request_states.get(request_id)
        source = _names(replica)
        follows = self._held_ends.any_from(source, request_id)
        if state is None or not (failed or output.finished or follows):
            return False
        number = next(self._clock)
        aborts = failed or state.streaming.enabled
        predecessors: Predecessors = {}
        if failed or output.finished:
            predecessors = self._precedence.before_end(
                self._members.stages, replica.stage_id, request_id, number, aborts=aborts, failed=failed
            )
        if not predecessors and not follows and not self._held_ends.any_before(number, (request_id,)):
            return False
        self._counters["held"] += 1
        held = HeldEnd(number, (request_id,), lambda: self._route_diffusion(replica, output), source)
        self._held_ends.add(held, predecessors)
        return True

    def _is_only_metrics(self, replica: Replica, output: Any) -> bool:
        """Let upstream take the metrics of a diffusion stage's output; whether there is nothing else in it."""
        return bool(self._orchestrator._absorb_diffusion_metrics(*_names(replica), output))

    async def _route_diffusion(self, replica: Replica, output: Any) -> None:
        """A diffusion stage's output through upstream's routing."""
        if not self._is_diffusion_start(output):
            replica.pool.record_output_timestamps([output])
        await self._orchestrator._handle_processed_outputs(*_names(replica), [output])
        self._note_routed(replica, [output])


async def _nothing_there() -> Outcome:
    return "nothing"


def _names(replica: Replica) -> tuple[int, int]:
    """Stage and replica, as upstream's functions, messages and reports name them."""
    return replica.stage_id, replica.replica_id
