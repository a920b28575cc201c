"""The wrappers of ``queue_metrics``: what is observed in a server, and what ``/metrics`` shows.

Upstream's function runs first where possible, so an exception of this patch costs only figures.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakSet, ref

import janus

from omni_fastpath import queues, threads
from omni_fastpath.connection import Connection, Follower, follow, follower
from omni_fastpath.guard import AwaitedCall, Call
from omni_fastpath.ledger import state_of

from . import PREFIX
from .account import Account, End
from .first_output import OUTPUTS, SEEN, FirstOutput, distributions, unread_s
from .histograms import Sample

_patch = state_of("queue_metrics")
_counters = _patch.counters
_guard = _patch.guard("observing")

WITHOUT_S = 30.0
"""After this time without an output a request is counted."""

LAG_EVERY_S = 0.25
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where upstream's connector puts chunks

_ACCOUNT = "_omni_fastpath_account"
_accounts: list[ref[Account]] = []
"""One for each orchestrator, which keeps it. Empty after observation has ended."""
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
"""The measured event loops. A loop that is removed is no longer measured."""
_queues: list[ref[Any]] = []
"""The queues between an orchestrator and its front end."""
_front_ends: dict[Any, ref[Any]] = {}
"""The front ends by the threads of their orchestrators."""
_journeys: dict[str, FirstOutput] = {}
"""By the orchestrator's request id."""


def _after(observe: Callable[..., None]) -> Callable[..., Any]:
    """A wrapper that calls upstream's function, and then ``observe`` with the same instance and arguments."""

    def wrapper(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        observe(instance, *args, **kwargs)
        return result

    return wrapper


def _around(begin: Callable[..., End]) -> Callable[..., Any]:
    """A wrapper of a coroutine function that calls ``begin``, upstream's function, and the result of ``begin``."""

    async def wrapper(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> Any:
        end = begin(instance, *args, **kwargs)
        result = await wrapped(*args, **kwargs)
        if end is not None:
            end()
        return result

    return wrapper


def measure_lag(name: str) -> None:
    """Measure how late the running event loop runs a timer, four times per second, if it is not measured yet."""
    loop, lag = asyncio.get_running_loop(), SEEN.of("event_loop_lag_seconds", loop=name)

    def measure(due_s: float) -> None:
        with _guard:
            if loop in _loops:
                lag.observe(max(0.0, monotonic() - due_s))
                loop.call_later(LAG_EVERY_S, measure, monotonic() + LAG_EVERY_S)

    if loop not in _loops:
        _loops.add(loop)
        loop.call_later(LAG_EVERY_S, measure, monotonic() + LAG_EVERY_S)


# ---- A request's connection ----


class Followed(Follower):
    """A POST request, from the application's first line to its end."""

    def __init__(self, connection: Connection) -> None:
        self.journey = FirstOutput(monotonic() - unread_s(connection.servers))
        self._send, connection.send = connection.send, self._observed_send

    async def _observed_send(self, message: Any) -> None:
        await self._send(message)
        with _guard:
            self.journey.note_sent(message)

    def ended(self) -> None:
        """Follow it no more."""
        _journeys.pop(self.journey.request_id, None)
        self.journey.request_id = "ended"


follow(_patch, lambda connection: Followed(connection) if connection.is_post else None)


@_after
def wrapped_request_made(request: Any, *_: Any, **__: Any) -> None:
    """Observe the queue of a new request in the front end."""
    followed, queue = follower(_patch.patch.name), request.queue
    if followed is not None and not followed.journey.request_id and isinstance(queue, asyncio.Queue):
        journey = followed.journey
        journey.request_id = request.request_id
        _journeys[request.request_id] = journey
        _override(queue, "_put", journey.note_handed_over)
        _override(queue, "_get", journey.note_taken)


def _override(queue: Any, name: str, observe: Callable[[Any], bool]) -> None:
    """Call *observe* with the item after each put, or get, until it returns True."""
    upstreams = getattr(queue, name)

    def observed(*item: Any) -> Any:
        got = upstreams(*item)
        with _guard:
            if observe(*item or (got,)):
                put_back()
        return got

    put_back = queues.override(queue, name, observed)


@_after
def wrapped_final_output_handler(front_end: Any) -> None:
    """Observe the orchestrator's queue. Called when a request begins, on the front end's event loop."""
    measure_lag("front_end")
    threads.note(threads.FRONT_END)
    _front_ends[front_end.engine.orchestrator_thread] = ref(front_end)
    queue = front_end.engine.output_queue
    if isinstance(queue, janus.Queue) and all(each() is not queue for each in _queues):  # else an embedder's own
        _queues.append(ref(queue))
        _override(queue, "_put", partial(_put, queue))


def _put(queue: Any, message: Any) -> bool:
    """Observe the orchestrator's put, under the queue's lock. Returns True if observation has ended."""
    journey = _journeys.get(getattr(message, "request_id", None) or "")
    first = None if journey is None else journey.first_in(message)
    if first is not None:
        first.note_put(message, queue.sync_q.qsize() - 1)
    return not _accounts


# ---- The orchestrator ----


@_around
def wrapped_output_handler(orchestrator: Any) -> None:
    """Observe an orchestrator. Called on its event loop before either of its loops begins."""
    for output in OUTPUTS:
        distributions(output)
    account = Account(orchestrator, _journeys, _counters)
    setattr(orchestrator, _ACCOUNT, account)
    _accounts.append(ref(account))
    measure_lag("orchestrator")


@_around
def wrapped_submit_initial(_pool: Any, request_id: str, *_: Any, **__: Any) -> End:
    """Observe the submission of a request to a stage."""
    journey = _journeys.get(request_id)
    return None if journey is None else journey.note_submitted


def _of_account(begin: Callable[..., End]) -> Callable[..., Any]:
    """A wrapper around which *begin* of the orchestrator's account observes, with upstream's arguments."""

    @_around
    def observe(orchestrator: Any, *args: Any, **kwargs: Any) -> End:
        account = vars(orchestrator).get(_ACCOUNT)
        return None if account is None else begin(account, *args, **kwargs)

    return observe


wrapped_process_llm_stage_outputs = _of_account(Account.processing)
wrapped_handle_processed_outputs = _of_account(Account.routing)


# ---- Figures ----


def figures() -> dict[str, list[Sample]]:
    """The current samples for ``/metrics``. The thread that writes the state file calls it."""
    found: dict[str, list[Sample]] = {}
    gauges = ((name, {"labels": labels, "value": value}) for name, value, labels in _gauges())
    for name, sample in itertools.chain(gauges, SEEN.samples()):
        found.setdefault(PREFIX + name, []).append(sample)
    return found


def _gauges() -> Iterator[tuple[str, float, dict[str, str]]]:
    for account in filter(None, [each() for each in _accounts]):
        waits: dict[tuple[int, int | None], list[float]] = {}
        for stage_id, replica_id, waiting in account.depths():
            waits[stage_id, replica_id] = []
            yield "queued_raw_outputs", waiting, _labels(stage_id, replica_id)
        if account.thread in _front_ends and getattr(_front_ends[account.thread](), "_paused", False):
            account.note_paused()
        for key, seconds in account.without_output():
            waits.setdefault(key, []).append(seconds)
        for key, each in waits.items():
            yield "requests_without_output", sum(seconds >= WITHOUT_S for seconds in each), _labels(*key)
            yield "longest_without_output_seconds", max(each, default=0.0), _labels(*key)
    if _accounts:
        yield "queued_messages", sum(queue.sync_q.qsize() for each in _queues if (queue := each()) is not None), {}
        if os.path.isdir(SHARED_MEMORY):  # noqa: PTH112 - no other call here makes a Path
            room = os.statvfs(SHARED_MEMORY)
            yield "shared_memory_used_ratio", 1 - room.f_bfree / room.f_blocks, {}


def _labels(stage_id: int, replica_id: int | None) -> dict[str, str]:
    return {"stage": str(stage_id), "replica": "" if replica_id is None else str(replica_id)}


# ---- The end ----


def step_aside() -> None:
    """End all observation, and forget all figures."""
    for known in (_journeys, _loops, _accounts, _queues, _front_ends, SEEN):
        known.clear()
