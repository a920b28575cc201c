"""The loop that replaces both of the orchestrator's loops: wake on arrival, drain within a budget, stages in an order.

One ``DrainLoop`` serves one orchestrator until shutdown, on the orchestrator's thread. All processing is upstream's
(``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``); this file decides only when a raw output is taken, and
``order.py`` from which stage.

The budget is shaped after Linux NAPI: an item and a time limit, and a counter for each that says how often a pass
ended on it. The socket readers of all replicas run on the same event loop, so that an empty queue may mean "not read
yet": the loop yields after ``_YIELD_AFTER_NS`` of work, inside a pass too.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sized
from itertools import count
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple, Protocol

from omni_fastpath.hooks.specs import PassReport, RawOutputView
from omni_fastpath.ledger import logger
from omni_fastpath.patches.budgeted_drain import FLOORS_TOGETHER
from omni_fastpath.patches.budgeted_drain.order import Lane, NextStage, Order, Stage
from omni_fastpath.patches.budgeted_drain.overtaking import Ends, Held, Holds, Needs
from omni_fastpath.patches.budgeted_drain.pace import Pace

_YIELD_AFTER_NS = 100_000
"""Work after which the loop yields. A yield costs some ten microseconds, and what arrives meanwhile waits for it."""

_YIELD_TURNS = 3
"""Most turns of the event loop in a yield. What stands in a socket is in the client's queue after three: in the first
the selector finds it, in the second its handler runs, in the third vLLM's reader. When nothing else is about to run
after the first, the selector has found nothing, and the other two would do so too."""

_IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as upstream's event-driven loop has it: it only paces the monitor's idle note and
the look at membership, since every arrival, attach and shutdown wakes the loop."""

_LOOK_AFTER_NS = 1_000_000
"""Time after which a busy loop looks at membership again, a millisecond: the pace of upstream's poll loop. A replica
that is gone is noticed before each raw output, and an attach wakes the loop, so that one that was woken works first."""

_POLL_WAIT_S = 0.001
"""Upstream's cadence for what can only be polled: diffusion stages and clients without an output queue."""

FLOOR = 0.1
"""Floor of a stage where none is set, with up to five stages; more stages share a half."""


def floor_of(floor: float | None, stages: int) -> float:
    """The floor in force: the one that is set, by default ``min(0.1, 0.5 / stages)``.

    A pipeline whose stages the deploy YAML does not name may have more of them than the set one allows; then, what they
    can get.
    """
    greatest = FLOORS_TOGETHER / max(stages, 1)
    if floor is not None and floor > greatest:
        logger.warning(
            "omni-fastpath: budgeted_drain.floor is %s, %s stages can have %.3g; it is that", floor, stages, greatest
        )
    return min(FLOOR if floor is None else floor, greatest)


class _Unreadable(NamedTuple):
    """What stands for a raw output that could not be read."""

    error: Exception


class Took(enum.Enum):
    """What became of a raw output that was taken."""

    FAILED = enum.auto()
    """Processing it raised, and that was handled."""
    DROPPED = enum.auto()
    """It had no content, and upstream's rule drops it."""
    INVISIBLE = enum.auto()
    """It was processed and brought nobody anything."""
    ROUTABLE = enum.auto()
    """It was processed and brought somebody something."""


_COUNTED_ENDINGS = ("empty", "routable", "items", "time", "floor", "outranked")


class Upstream(NamedTuple):
    """What the loop needs of upstream besides the orchestrator itself, so that this file imports none of it."""

    dead_error: type[BaseException]
    is_diffusion_start: Callable[[Any], bool]
    dequeue: Callable[[Any], Any]
    """The dequeue that never waits, as a function of the client. Bound once: a class that somebody changes later must
    not change a loop that runs."""
    can_dequeue: Callable[[Any], bool]
    """Whether a client is served with ``dequeue``; any other is polled as upstream polls it."""
    error_reason: Any
    """``FinishReason.ERROR``."""


class Limits(Protocol):
    """The values of ``budgeted_drain``."""

    max_items: int
    max_time_us: int
    stop_at_first_routable: bool
    order: str
    floor: float | None


class Observers(NamedTuple):
    """Hooks that somebody implements; None where nobody does."""

    on_dequeued: Callable[..., Any] | None = None
    on_pass_end: Callable[..., Any] | None = None
    on_routed: Callable[..., Any] | None = None


class _OneItem:
    """A client that has just one raw output: how one that is already taken passes through ``_poll_stage_raw``.

    One for all: upstream asks at once, and the loop takes one raw output at a time.
    """

    __slots__ = ("item",)

    def __init__(self) -> None:
        self.item: Any = None

    async def get_output_async(self) -> Any:
        item, self.item = self.item, None
        return item


class _Bell:
    """Tells whenever something is put into one client's queue.

    Upstream's socket reader holds the queue object itself, so the queue is not replaced: its ``put_nowait`` gets an
    instance attribute in front, which ``remove`` takes off.
    """

    def __init__(self, queue: asyncio.Queue[Any], came: Callable[[], None], ring: Callable[[], None]) -> None:
        self.queue = queue
        put = queue.put_nowait

        def put_and_ring(item: Any) -> None:
            put(item)
            came()
            ring()

        self._ours = put_and_ring
        vars(queue)["put_nowait"] = put_and_ring

    def remove(self) -> None:
        if vars(self.queue).get("put_nowait") is self._ours:
            del vars(self.queue)["put_nowait"]


class DrainLoop:
    """Serves one orchestrator's stages until shutdown.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        limits: Item and time budget, whether a routable output ends a pass, order and floor.
        counters: The patch's engagement counters.
        policy: Whether a processed raw output is routable; an exception of its counts as "yes".
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
        policy: Callable[[RawOutputView], bool],
        ask: NextStage | None,
        observers: Observers,
        upstream: Upstream,
        gauge: Callable[[int], None] | None = None,
    ) -> None:
        self._orch = orchestrator
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._max_items = limits.max_items
        self._max_time_ns = limits.max_time_us * 1000
        self._stop_at_routable = limits.stop_at_first_routable
        self._counters = counters
        self._policy = policy
        self._observers = observers
        self._upstream = upstream
        self._gauge = gauge
        self._pace = Pace(orchestrator.output_async_queue, counters)
        self._one = _OneItem()
        self._clock = count()
        self._holds = Holds()
        self._ends = Ends(orchestrator.request_states, upstream.error_reason)
        self._order = Order(
            limits.order, floor_of(limits.floor, orchestrator.num_stages), ask, orchestrator.request_states
        )
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._bells: dict[tuple[int, int], _Bell] = {}
        self._stages: list[Stage] = []
        self._polled: list[tuple[int, Any, int]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look_again = True
        self._look_ns = self._looked_ns = self._poll_ns = self._last_yield_ns = 0
        self._scheduled: Sized | None = None

    # ---- The loop ----

    async def run(self) -> None:
        """Dispatch until the orchestrator's shutdown event is set; errors propagate as upstream's loops let them."""
        self._loop = asyncio.get_running_loop()
        # asyncio's own list of what is about to run; other event loops have none.
        self._scheduled = getattr(self._loop, "_ready", None)
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._ring())
        DrainLoop.running = (*DrainLoop.running, self)
        self._last_yield_ns = perf_counter_ns()
        note_loop = self._orch._orch_monitor.note_loop
        try:
            while not self._shutdown.is_set():
                stage = self._order.next()
                if stage is not None:
                    await self._pass(stage)
                    note_loop(idle=False)
                    if self._gauge is not None:
                        self._tell()
                    if perf_counter_ns() < self._look_ns and not self._look_again:
                        continue
                happened = await self._look()
                if stage is not None:
                    continue
                if happened:
                    await self._yield()
                    continue
                if self._holds and not self._has_backlog():
                    await self._let_go(self._holds.all())
                note_loop(idle=True)
                await self._wait()
        finally:
            DrainLoop.running = tuple(loop for loop in DrainLoop.running if loop is not self)
            shutdown.cancel()
            for bell in self._bells.values():
                bell.remove()
            self._bells.clear()
            self._lanes.clear()

    async def _wait(self) -> None:
        """Sleep until an output, an attach, a poll or shutdown is due."""
        if self._look_again or self._has_backlog():
            await self._yield()  # it came behind the loop's back; the event loop still gets its turn
            return
        self._note_stretch(perf_counter_ns())
        self._waiter = asyncio.get_running_loop().create_future()
        timer = self._waiter.get_loop().call_later(_POLL_WAIT_S if self._polled else _IDLE_WAIT_S, self._ring)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        self._counters["wakeups"] += 1
        self._last_yield_ns = now_ns = perf_counter_ns()
        if not self._holds:  # what is held may wait for a replica that is gone
            self._look_ns = max(self._look_ns, min(now_ns + _LOOK_AFTER_NS, self._looked_ns + int(_IDLE_WAIT_S * 1e9)))

    def _ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring_and_tell(self) -> None:
        self._ring()
        self._tell()

    def _tell(self) -> None:
        """Tell upstream's monitor how many raw outputs wait, as its event-driven loop does at each put and get."""
        if self._gauge is not None:
            self._gauge(sum(len(lane.waiting) for lane in self._lanes.values()))

    def _has_backlog(self) -> bool:
        return any(stage.has_backlog() for stage in self._stages)

    async def _yield(self) -> None:
        """Let everybody else on the event loop run, and what stands in the sockets come in."""
        began_ns = perf_counter_ns()
        self._note_stretch(began_ns)
        scheduled = self._scheduled
        for _ in range(_YIELD_TURNS):
            await asyncio.sleep(0)
            if scheduled is not None and not scheduled:
                break
        if self._pace.is_far_ahead():
            await self._pace.let_catch_up()
        self._last_yield_ns = ended_ns = perf_counter_ns()
        away_us = (ended_ns - began_ns) // 1000
        self._counters["longest_away_us"] = max(self._counters["longest_away_us"], away_us)

    def _note_stretch(self, now_ns: int) -> None:
        stretch_us = (now_ns - self._last_yield_ns) // 1000
        self._counters["longest_stretch_us"] = max(self._counters["longest_stretch_us"], stretch_us)

    # ---- Membership, and what can only be polled ----

    def attached(self, pool: Any) -> None:
        """A client was attached to ``pool``, on whatever thread: look at it now, not at the next idle note."""
        if self._loop is not None and any(each is pool for each in self._orch.stage_pools):
            self._look_again = True
            with contextlib.suppress(RuntimeError):  # closed meanwhile, on another thread: nobody is served any more
                self._loop.call_soon_threadsafe(self._ring)

    async def _look(self) -> bool:
        """Take note of who is there, and poll what can only be polled if it is due; whether anything happened."""
        now_ns = perf_counter_ns()
        happened = False
        if self._look_again or now_ns >= self._look_ns:
            self._look_again = False
            self._looked_ns = now_ns
            self._look_ns = now_ns + _LOOK_AFTER_NS
            happened = await self._look_at_replicas()
        if self._polled and now_ns >= self._poll_ns:
            polled = False
            for stage_id, pool, replica_id in self._polled:
                if self._shutdown.is_set():
                    return True
                poll = self._poll_diffusion if pool.stage_type == "diffusion" else self._poll
                polled |= await poll(stage_id, pool, replica_id)
            self._poll_ns = 0 if polled else perf_counter_ns() + int(_POLL_WAIT_S * 1e9)
            happened |= polled
        return happened

    async def _look_at_replicas(self) -> bool:
        """Hear the replicas that are there and no others; whether that has changed."""
        lanes: dict[tuple[int, int], Lane] = {}
        polled: list[tuple[int, Any, int]] = []
        changed = False
        for stage_id in range(self._orch.num_stages):
            pool = self._orch.stage_pools[stage_id]
            diffusion = pool.stage_type == "diffusion"
            for replica_id in pool.available_replica_ids():
                key = stage_id, replica_id
                lane = self._lanes.get(key)
                if lane is None or lane.client is not pool.clients[replica_id]:
                    changed = True
                    lane = None if diffusion else await self._hear(stage_id, pool, replica_id)
                if lane is not None:
                    lanes[key] = lane
                elif self._is_there(pool, replica_id):
                    polled.append((stage_id, pool, replica_id))
        left: list[Lane] = []
        for key in [key for key, lane in self._lanes.items() if lanes.get(key) is not lane]:
            # Evicted, detached, unavailable, or another client is in its slot.
            changed = True
            left.append(self._lanes[key])
            if key not in lanes and key in self._bells:  # not where the new client can only be polled: it is off
                self._bells.pop(key).remove()
        changed = changed and self._lanes != lanes
        self._lanes, self._polled = lanes, polled
        if changed:
            self._arrange()
        for lane in left:
            await self._let_go(self._holds.left(lane))
        return changed

    async def _hear(self, stage_id: int, pool: Any, replica_id: int) -> Lane | None:
        """Hang a bell on a new client's queue; None for a client that can only be polled."""
        client = pool.clients[replica_id]
        key = stage_id, replica_id
        if key in self._bells:  # another client was in this slot
            self._bells.pop(key).remove()
        queue = getattr(client, "outputs_queue", None)
        if not isinstance(queue, asyncio.Queue) or not self._upstream.can_dequeue(client):
            return None
        waiting = getattr(queue, "_queue", None)
        if type(waiting) is not deque:  # some other kind of queue, or another Python's
            return None
        stage = next((each for each in self._stages if each.stage_id == stage_id and each.pool is pool), None)
        lane = Lane(stage or Stage(stage_id, pool), replica_id, client, queue, waiting, self._clock)
        came = lane.arrivals.came
        self._bells[key] = _Bell(queue, came, self._ring if self._gauge is None else self._ring_and_tell)
        if not waiting:
            item = self._dequeue(lane)  # which starts upstream's socket reader
            if isinstance(item, _Unreadable):
                await self._failed(stage_id, pool, replica_id, client, item.error)
        return lane

    def _arrange(self) -> None:
        """Group the replicas by stage, and order the stages."""
        stages: dict[int, Stage] = {}
        for (stage_id, _), lane in self._lanes.items():
            stage = stages.setdefault(stage_id, lane.stage)
            lane.stage = stage
        for stage in stages.values():
            stage.lanes = deque(lane for lane in self._lanes.values() if lane.stage is stage)
        self._stages = list(stages.values())
        self._order.arrange(self._stages)

    async def _poll(self, stage_id: int, pool: Any, replica_id: int) -> bool:
        """A client without an output queue: upstream's own poll, one raw output."""
        client = pool.clients[replica_id]
        reading = pool.poll_llm_raw_output(replica_id, timeout_s=_POLL_WAIT_S)
        return await self._dispatch(stage_id, pool, replica_id, client, reading, judge=False) is not Took.DROPPED

    async def _poll_diffusion(self, stage_id: int, pool: Any, replica_id: int) -> bool:
        """A diffusion replica: at most one output, handled as upstream's loops do."""
        client = pool.clients[replica_id]
        try:
            output = pool.poll_diffusion_output(replica_id)
            if output is None:
                return False
            if self._orch._absorb_diffusion_metrics(stage_id, replica_id, output):
                return True
        except BaseException as error:
            await self._failed(stage_id, pool, replica_id, client, error)
            return True
        if not await self._held_back(stage_id, replica_id, output):
            await self._route(stage_id, replica_id, output)
        return True

    # ---- One replica ----

    async def _pass(self, stage: Stage) -> None:  # noqa: C901 - flat, because it runs for each raw output
        """Take raw outputs from a replica of ``stage`` until a pass ends.

        A replica of a stage that nobody sees gives one: it has no reason to be drained ahead of one that is seen. So
        does one of a stage that is due: the order goes on after it. Whether an output is routable is asked only where
        it matters: it ends a pass so that another stage gets its turn, and under a fixed order nobody's turn comes.
        """
        lane = stage.take_turn()
        if lane is None:
            return
        order = self._order
        due = order.due is stage
        judges = stage.final_output and self._stop_at_routable and order.in_turn
        limit, at_limit = (self._max_items, "items") if stage.final_output else (1, "one")
        if due:
            limit, at_limit = 1, "floor"
        taken = worked_ns = 0
        ended: str | None = "gone" if self._is_gone(lane) else None
        started_ns = now_ns = perf_counter_ns()
        while ended is None:
            item_ns = now_ns
            item = self._dequeue(lane)
            if item is None or isinstance(item, _Unreadable):
                ended = await self._nothing(lane, item)
                break
            took = await self._handle(lane, item, judges and order.contested)
            now_ns = perf_counter_ns()
            order.spent(stage, now_ns - item_ns)
            if lane.awaited and (ripe := self._holds.passed(lane)):
                await self._let_go(ripe)
                now_ns = perf_counter_ns()
            worked_ns += now_ns - item_ns
            taken += 1
            ended = self._ending(took, lane)
            if ended is None and taken >= limit:
                ended = at_limit
            elif ended is None and worked_ns >= self._max_time_ns:
                ended = "time"
            elif ended is None and now_ns - self._last_yield_ns >= _YIELD_AFTER_NS:
                ended = await self._make_way(lane)
                now_ns = perf_counter_ns()
        if not due:
            order.passed(stage)
        self._note_pass(lane, taken, ended, now_ns - started_ns)
        if now_ns - self._last_yield_ns >= _YIELD_AFTER_NS and self._has_backlog():  # else the loop sleeps now
            await self._yield()

    async def _nothing(self, lane: Lane, found: _Unreadable | None) -> str:
        """A dequeue gave no raw output; how that ends the pass."""
        if found is None:
            return "empty"
        await self._failed(lane.stage.stage_id, lane.stage.pool, lane.replica_id, lane.client, found.error)
        return "gone"

    async def _make_way(self, lane: Lane) -> str | None:
        """Yield in the middle of a pass; why it ends there, or None when it goes on."""
        await self._yield()
        if self._is_gone(lane):
            return "gone"
        return None if self._order.is_still(lane.stage) else "outranked"

    def _dequeue(self, lane: Lane) -> Any:
        """The next raw output of one client, None when there is none, or what reading it raised."""
        try:
            item = self._upstream.dequeue(lane.client)
        except Exception as error:
            logger.exception("omni-fastpath: reading from stage-%s replica-%s failed", *_names(lane))
            item = _Unreadable(error)
        lane.arrivals.went()
        return item

    def _ending(self, took: Took, lane: Lane) -> str | None:
        """Why a pass ends after this output, budgets apart."""
        if took is Took.FAILED or self._is_gone(lane):
            return "gone"
        if not lane.waiting:
            return "empty"
        return "routable" if took is Took.ROUTABLE else None

    def _is_gone(self, lane: Lane) -> bool:
        """Whether a replica was evicted, detached or replaced meanwhile, or it is shutdown."""
        pool = lane.stage.pool
        return (
            self._shutdown.is_set()
            or pool.clients[lane.replica_id] is not lane.client
            or not pool.is_replica_available(lane.replica_id)
        )

    def _is_there(self, pool: Any, replica_id: int) -> bool:
        return pool.clients[replica_id] is not None and pool.is_replica_available(replica_id)

    def _note_pass(self, lane: Lane, taken: int, ended: str, duration_ns: int) -> None:
        if ended == "gone":
            self._look_again = True
        if not taken:
            return
        counters = self._counters
        counters["items"] += taken
        counters["passes"] += 1
        if ended in _COUNTED_ENDINGS:
            counters[f"ended_{ended}"] += 1
        if self._observers.on_pass_end is not None:
            report = PassReport(*_names(lane), taken, ended, len(lane.waiting), duration_ns / 1000)
            self._observers.on_pass_end(report=report)

    # ---- One raw output ----

    def _handle(self, lane: Lane, item: Any, judge: bool) -> Awaitable[Took]:
        """Put a raw output that was taken through all of upstream's handling, less what must not overtake."""
        stage = lane.stage
        if self._waits_elsewhere(stage) or self._holds:
            try:
                waiting = self._ends.split(lane, item, self._stages, self._holds)
            except Exception:
                self._ends.cannot_say()
                waiting = []
            for request_id, alone, needs, more in waiting:
                self._counters["held"] += 1
                go = functools.partial(self._dispatch_held, lane, alone)
                self._holds.add(Held(lane.arrivals.taken, (request_id,), go, lane, more), needs)
        return self._dispatch_raw(lane, item, judge=judge)

    def _dispatch_raw(self, lane: Lane, item: Any, *, judge: bool) -> Awaitable[Took]:
        stage = lane.stage
        self._one.item = item
        reading = stage.pool._poll_stage_raw(self._one)
        return self._dispatch(stage.stage_id, stage.pool, lane.replica_id, lane.client, reading, judge=judge)

    async def _dispatch_held(self, lane: Lane, raw_outputs: Any) -> None:
        started_ns = perf_counter_ns()
        await self._dispatch_raw(lane, raw_outputs, judge=False)
        self._order.spent(lane.stage, perf_counter_ns() - started_ns)

    async def _let_go(self, ripe: list[Held]) -> None:
        """Dispatch what was held."""
        for held in ripe:
            await held.go()

    async def _held_back(self, stage_id: int, replica_id: int, output: Any) -> bool:
        """Whether a diffusion stage's output must wait, because it ends its request and more of that came before."""
        failed = getattr(output, "error", None) is not None
        request_id = output.request_id
        state = self._orch.request_states.get(request_id)
        source = stage_id, replica_id
        follows = self._holds.of(source, request_id)
        if state is None or not (failed or output.finished or follows):
            return False
        number = next(self._clock)
        aborts = failed or state.streaming.enabled
        needs: Needs = {}
        if failed or output.finished:
            needs = self._ends.needs(self._stages, stage_id, request_id, number, aborts=aborts, failed=failed)
        if not needs and not follows and not self._holds.before(number, (request_id,)):
            return False
        self._counters["held"] += 1
        go = functools.partial(self._route, stage_id, replica_id, output)
        self._holds.add(Held(number, (request_id,), go, source), needs)
        return True

    async def _route(self, stage_id: int, replica_id: int, output: Any) -> None:
        """A diffusion stage's output through upstream's routing."""
        if not self._upstream.is_diffusion_start(output):
            self._orch.stage_pools[stage_id].record_output_timestamps([output])
        await self._orch._handle_processed_outputs(stage_id, replica_id, [output])
        self._note_routed(stage_id, replica_id, [output])

    async def _dispatch(
        self, stage_id: int, pool: Any, replica_id: int, client: Any, reading: Awaitable[Any], *, judge: bool
    ) -> Took:
        """Put the raw output that ``reading`` gives through all of upstream's handling."""
        terminal_ids: set[str] = set()
        try:
            raw = await reading
            if raw is None:
                return Took.DROPPED
            if self._observers.on_dequeued is not None:
                self._observers.on_dequeued(stage_id=stage_id, replica_id=replica_id, raw_outputs=raw)
            processed = await self._orch._process_llm_stage_outputs(stage_id, replica_id, raw, terminal_ids)
        except BaseException as error:
            await self._failed(stage_id, pool, replica_id, client, error)
            return Took.FAILED
        # Before routing, which forgets a request that ends.
        routable = judge and self._judge(stage_id, replica_id, raw, processed)
        await self._orch._handle_processed_outputs(stage_id, replica_id, processed)
        await self._orch._finish_raw_terminal_requests(stage_id, replica_id, terminal_ids)
        self._note_routed(stage_id, replica_id, processed)
        return Took.ROUTABLE if routable else Took.INVISIBLE

    def _waits_elsewhere(self, stage: Stage) -> bool:
        """Whether anything waits at another stage."""
        for other in self._stages:  # noqa: SIM110 - as in Stage.has_backlog
            if other is not stage and other.has_backlog():
                return True
        return False

    def _judge(self, stage_id: int, replica_id: int, raw: Any, processed: list[Any]) -> bool:
        try:
            return self._policy(RawOutputView(stage_id, replica_id, True, raw, processed, self._orch.request_states))
        except Exception:
            # Ending the pass loses nothing; the next output is judged afresh.
            if not self._counters["judge_errors"]:
                logger.exception("omni-fastpath: judging a raw output failed; such an output ends its pass")
            self._counters["judge_errors"] += 1
            return True

    def _note_routed(self, stage_id: int, replica_id: int, processed: list[Any]) -> None:
        if self._observers.on_routed is not None:
            for output in processed:
                self._observers.on_routed(stage_id=stage_id, replica_id=replica_id, output=output)

    async def _failed(self, stage_id: int, pool: Any, replica_id: int, client: Any, error: BaseException) -> None:
        """What upstream's loops do with an exception: evict a dead replica, ignore during shutdown, else give up.

        Raises:
            BaseException: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, self._upstream.dead_error):
            await self._died(stage_id, pool, replica_id, client, error)
            return
        if not isinstance(error, Exception):
            raise error
        if self._shutdown.is_set():
            return
        logger.error("omni-fastpath: processing of stage-%s replica-%s failed", stage_id, replica_id, exc_info=error)
        raise error

    async def _died(self, stage_id: int, pool: Any, replica_id: int, client: Any, error: BaseException) -> None:
        """Let upstream evict a dead replica and fail its requests, after what came of them before.

        Until then the replica stays with its bindings, by which upstream finds whom to tell, and is left out of the
        selection: nobody new is sent to it, and nobody else waits. A distributed pool's ``pick`` asks the hub alone. If
        its slot is empty or another's by then, its requests are told all the same, each once.
        """
        if pool.clients[replica_id] is not client:
            return  # the death of a client that was replaced is not its successor's, and one death is told once
        number = next(self._clock)
        survives = any(each != replica_id for each in pool.live_replica_ids())
        stranded = {
            request_id: state
            for request_id, state in self._orch.request_states.items()
            if stage_id in state.stage_submit_ts
            and (not survives or pool.get_bound_replica_id(request_id) == replica_id)
        }
        bound = {request_id for request_id in stranded if pool.get_bound_replica_id(request_id) == replica_id}
        needs: Needs = {}
        for request_id in stranded:
            found = self._ends.needs(self._stages, stage_id, request_id, number, aborts=True, failed=True)
            for lane, last in found.items():
                needs[lane] = max(needs.get(lane, last), last)
        if not needs and not self._holds.before(number, stranded):
            await self._orch._handle_dead_replica(stage_id, replica_id, error)
            return
        excluded = pool.is_replica_available(replica_id)
        pool._unavailable_replicas.add(replica_id)
        self._look_again = True

        async def evict() -> None:
            slot = pool.clients[replica_id]
            if excluded and (slot is None or slot is client):
                pool._unavailable_replicas.discard(replica_id)
            if slot is client:
                await self._orch._handle_dead_replica(stage_id, replica_id, error)
                return
            if slot is not None:  # nobody else shuts down a client that was replaced
                with contextlib.suppress(Exception):
                    client.shutdown()
            await self._tell_stranded(stage_id, pool, replica_id, stranded, bound)

        self._holds.add(Held(number, stranded, evict), needs)

    async def _tell_stranded(
        self, stage_id: int, pool: Any, replica_id: int, stranded: dict[str, Any], bound: set[str]
    ) -> None:
        """Fail who was stranded by a death and has not been told, by upstream's rule (``_handle_dead_replica``).

        Args:
            stage_id: The stage.
            pool: Its pool.
            replica_id: The dead replica's slot: empty by now, or another client's, whose own requests are not meant.
            stranded: The requests by id, as they were when it died.
            bound: Those of them that were bound to it.
        """
        replaced = pool.clients[replica_id] is not None
        for request_id, state in stranded.items():
            now_at = pool.get_bound_replica_id(request_id)
            # Whoever detaches a replica drops the rows of the coordinator's bindings and tells those requests himself.
            lost = request_id in bound and (now_at == replica_id or (now_at is None and replaced))
            if self._orch.request_states.get(request_id) is state and (lost or not pool.live_replica_ids()):
                await self._orch._fail_request_dead_stage(request_id, stage_id)


def _names(lane: Lane) -> tuple[int, int]:
    """Stage and replica, as messages and reports name them."""
    return lane.stage.stage_id, lane.replica_id
