"""The loop that replaces the orchestrator's poll loop: wake on arrival, drain within a budget.

One ``DrainLoop`` serves one orchestrator from ``_orchestration_loop`` until shutdown, on the orchestrator's thread.
All processing is upstream's (``vllm_omni/engine/orchestrator.py``, ``stage_pool.py``); this file decides only when a
raw output is taken and from where.

The budget is shaped after Linux NAPI: an item and a time limit, and a counter for each that says how often a pass
ended on it. The socket readers of all replicas run on the same event loop, so that an empty queue may mean "not read
yet": the loop yields after every stage that gave something, and inside a pass after dear work.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple, Protocol

from omni_fastpath.hooks.specs import PassReport, RawOutputView
from omni_fastpath.ledger import logger

_YIELD_AFTER_NS = 500_000
"""Work after which the loop yields even inside a pass. A yield costs microseconds, so this is about one percent."""

_IDLE_WAIT_S = 0.5
"""Longest sleep without an arrival, as upstream's event-driven loop has it: it only paces the monitor's idle note and
the look at membership, since every arrival, attach and shutdown wakes the loop."""

_POLL_WAIT_S = 0.001
"""Upstream's cadence for what can only be polled: diffusion stages and clients without an output queue."""


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


_COUNTED_ENDINGS = ("empty", "routable", "items", "time")


class Upstream(NamedTuple):
    """What the loop needs of upstream besides the orchestrator itself, so that this file imports none of it."""

    dead_error: type[BaseException]
    is_diffusion_start: Callable[[Any], bool]
    dequeue: Callable[[Any], Any]
    """The dequeue that never waits, as a function of the client. Bound once: a class that somebody changes later must
    not change a loop that runs."""
    can_dequeue: Callable[[Any], bool]
    """Whether a client is served with ``dequeue``; any other is polled as upstream polls it."""


class Limits(Protocol):
    """The values of ``budgeted_drain``."""

    max_items: int
    max_time_us: int
    stop_at_first_routable: bool


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
    """Rings the loop whenever something is put into one client's queue.

    Upstream's socket reader holds the queue object itself, so the queue is not replaced: its ``put_nowait`` gets an
    instance attribute in front, which ``remove`` takes off.
    """

    def __init__(self, queue: asyncio.Queue[Any], ring: Callable[[], None]) -> None:
        self.queue = queue
        put = queue.put_nowait

        def put_and_ring(item: Any) -> None:
            put(item)
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
        limits: Item and time budget and whether a routable output ends a pass.
        counters: The patch's engagement counters.
        policy: Whether a processed raw output is routable; an exception of its counts as "yes".
        observers: Hooks to call.
        upstream: What else is needed of upstream.
    """

    running: ClassVar[tuple[DrainLoop, ...]] = ()
    """The loops of this process that run now; replaced, never changed, because other threads read it."""

    def __init__(
        self,
        orchestrator: Any,
        limits: Limits,
        counters: dict[str, int],
        policy: Callable[[RawOutputView], bool],
        observers: Observers,
        upstream: Upstream,
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
        self._one = _OneItem()
        self._bells: dict[tuple[int, int], tuple[Any, _Bell]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard: list[asyncio.Queue[Any]] = []
        self._look_again = False
        self._polling = False
        self._last_yield_ns = 0

    # ---- The loop ----

    async def run(self) -> None:
        """Dispatch until the orchestrator's shutdown event is set; errors propagate as upstream's loop lets them."""
        self._loop = asyncio.get_running_loop()
        shutdown = asyncio.ensure_future(self._shutdown.wait())
        shutdown.add_done_callback(lambda _: self._ring())
        DrainLoop.running = (*DrainLoop.running, self)
        self._last_yield_ns = perf_counter_ns()
        try:
            while not self._shutdown.is_set():
                progressed = await self._sweep()
                if self._shutdown.is_set():
                    return
                self._orch._orch_monitor.note_loop(idle=not progressed)
                if not progressed:
                    await self._wait()
        finally:
            DrainLoop.running = tuple(loop for loop in DrainLoop.running if loop is not self)
            shutdown.cancel()
            for _, bell in self._bells.values():
                bell.remove()
            self._bells.clear()

    async def _sweep(self) -> bool:
        """One pass over every replica of every stage; whether anything was taken."""
        progressed = False
        self._polling = self._look_again = False
        self._heard.clear()
        for stage_id in range(self._orch.num_stages):
            pool = self._orch.stage_pools[stage_id]
            diffusion = pool.stage_type == "diffusion"
            gave = False
            for replica_id in pool.available_replica_ids():
                if self._shutdown.is_set():
                    return True
                known = self._bells.get((stage_id, replica_id))
                if known is not None and known[0] is pool.clients[replica_id]:
                    self._heard.append(known[1].queue)
                    if not known[1].queue.empty():
                        gave |= await self._drain(stage_id, pool, replica_id)
                elif diffusion:
                    self._polling = True
                    gave |= await self._poll_diffusion(stage_id, pool, replica_id)
                elif self._hear(stage_id, pool, replica_id):
                    gave |= await self._drain(stage_id, pool, replica_id)
                else:
                    self._polling = True
                    gave |= await self._poll(stage_id, pool, replica_id)
            if gave:
                progressed = True
                await self._yield()
        if len(self._bells) > len(self._heard):
            self._forget_unheard()
        return progressed

    async def _wait(self) -> None:
        """Sleep until an output, an attach, a diffusion poll or shutdown is due."""
        if self._look_again or not all(queue.empty() for queue in self._heard):
            # It came during a yield, behind the sweep's back. The event loop still gets its turn.
            await self._yield()
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(_POLL_WAIT_S if self._polling else _IDLE_WAIT_S, self._ring)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None
        self._counters["wakeups"] += 1
        self._last_yield_ns = perf_counter_ns()

    def _ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _yield(self) -> None:
        stretch_us = (perf_counter_ns() - self._last_yield_ns) // 1000
        self._counters["longest_stretch_us"] = max(stretch_us, self._counters["longest_stretch_us"])
        await asyncio.sleep(0)
        self._last_yield_ns = perf_counter_ns()

    # ---- Membership ----

    def attached(self, pool: Any) -> None:
        """A client was attached to ``pool``, on whatever thread: look at it now, not at the next idle note."""
        if self._loop is not None and any(each is pool for each in self._orch.stage_pools):
            self._look_again = True
            self._loop.call_soon_threadsafe(self._ring)

    def _hear(self, stage_id: int, pool: Any, replica_id: int) -> bool:
        """Hang a bell on a new client's queue; False for a client that can only be polled.

        The caller drains it even if its queue is empty: the first dequeue is what starts upstream's socket reader.
        """
        client = pool.clients[replica_id]
        key = stage_id, replica_id
        if key in self._bells:  # another client was in this slot
            self._bells.pop(key)[1].remove()
        queue = getattr(client, "outputs_queue", None)
        if not isinstance(queue, asyncio.Queue) or not self._upstream.can_dequeue(client):
            return False
        self._bells[key] = client, _Bell(queue, self._ring)
        self._heard.append(queue)
        return True

    def _forget_unheard(self) -> None:
        """Take the bells off replicas that are no longer served (evicted, detached, unavailable)."""
        heard = {id(queue) for queue in self._heard}
        for key, (_, bell) in list(self._bells.items()):
            if id(bell.queue) not in heard:
                bell.remove()
                del self._bells[key]

    # ---- One replica ----

    async def _drain(self, stage_id: int, pool: Any, replica_id: int) -> bool:
        """Take raw outputs from one replica until a pass ends; whether anything happened.

        A replica of a stage that nobody sees gives one: it has no reason to be drained ahead of one that is seen.
        """
        client = pool.clients[replica_id]
        final_output = pool.final_output
        limit = self._max_items if final_output else 1
        taken = worked_ns = 0
        ended: str | None = None
        started_ns = now_ns = perf_counter_ns()
        while ended is None:
            item_ns = now_ns
            item = self._dequeue(stage_id, replica_id, client)
            if item is None:
                ended = "empty"
                break
            if isinstance(item, _Unreadable):
                await self._failed(stage_id, pool, replica_id, client, item.error)
                ended = "gone"
                break
            self._one.item = item
            reading = pool._poll_stage_raw(self._one)
            took = await self._dispatch(stage_id, pool, replica_id, client, reading, judge=final_output)
            now_ns = perf_counter_ns()
            taken += 1
            worked_ns += now_ns - item_ns
            ended = self._ending(took, pool, replica_id, client)
            if ended is None and taken >= limit:
                ended = "items" if final_output else "one"
            if ended is None and worked_ns >= self._max_time_ns:
                ended = "time"
            if ended is None and now_ns - self._last_yield_ns >= _YIELD_AFTER_NS:
                await self._yield()
                now_ns = perf_counter_ns()
                if self._is_gone(pool, replica_id, client):
                    ended = "gone"
        if taken:
            self._note_pass(stage_id, replica_id, client, taken, ended, now_ns - started_ns)
            if now_ns - self._last_yield_ns >= _YIELD_AFTER_NS:
                await self._yield()
        return ended != "empty" or taken > 0

    def _dequeue(self, stage_id: int, replica_id: int, client: Any) -> Any:
        """The next raw output of one client, None when there is none, or what reading it raised."""
        try:
            return self._upstream.dequeue(client)
        except Exception as error:
            logger.exception("omni-fastpath: reading from stage-%s replica-%s failed", stage_id, replica_id)
            return _Unreadable(error)

    def _ending(self, took: Took, pool: Any, replica_id: int, client: Any) -> str | None:
        """Why a pass ends after this output, budgets apart."""
        if took is Took.FAILED or self._is_gone(pool, replica_id, client):
            return "gone"
        if client.outputs_queue.empty():
            return "empty"
        return "routable" if took is Took.ROUTABLE else None

    def _is_gone(self, pool: Any, replica_id: int, client: Any) -> bool:
        """Whether the pass must end because its replica was evicted, detached or replaced meanwhile, or at shutdown."""
        return (
            self._shutdown.is_set()
            or pool.clients[replica_id] is not client
            or not pool.is_replica_available(replica_id)
        )

    def _note_pass(self, stage_id: int, replica_id: int, client: Any, taken: int, ended: str, duration_ns: int) -> None:
        counters = self._counters
        counters["items"] += taken
        counters["passes"] += 1
        if ended in _COUNTED_ENDINGS:
            counters[f"ended_{ended}"] += 1
        if self._observers.on_pass_end is not None:
            queued = client.outputs_queue.qsize()
            report = PassReport(stage_id, replica_id, taken, ended, queued, duration_ns / 1000)
            self._observers.on_pass_end(report=report)

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
        routable = judge and self._stop_at_routable and self._judge(stage_id, replica_id, raw, processed)
        await self._orch._handle_processed_outputs(stage_id, replica_id, processed)
        await self._orch._finish_raw_terminal_requests(stage_id, replica_id, terminal_ids)
        self._note_routed(stage_id, replica_id, processed)
        return Took.ROUTABLE if routable else Took.INVISIBLE

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
        """What upstream's loop does with an exception: evict a dead replica, ignore during shutdown, else give up.

        Raises:
            BaseException: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, self._upstream.dead_error) and pool.clients[replica_id] is not client:
            return  # the death of a client that was replaced meanwhile is not its successor's
        if isinstance(error, self._upstream.dead_error):
            await self._orch._handle_dead_replica(stage_id, replica_id, error)
            return
        if not isinstance(error, Exception):
            raise error
        if self._shutdown.is_set():
            return
        logger.error("omni-fastpath: processing of stage-%s replica-%s failed", stage_id, replica_id, exc_info=error)
        raise error

    # ---- What can only be polled ----

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
            if not self._upstream.is_diffusion_start(output):
                pool.record_output_timestamps([output])
        except BaseException as error:
            await self._failed(stage_id, pool, replica_id, client, error)
            return True
        await self._orch._handle_processed_outputs(stage_id, replica_id, [output])
        self._note_routed(stage_id, replica_id, [output])
        return True
