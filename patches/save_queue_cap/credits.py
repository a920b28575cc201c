"""Which streams are left out of the next step because they, or all together, have too much on its way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .unfetched import NEAR_LOOK_S, WANTED_LOOK_S

if TYPE_CHECKING:
    from . import SaveQueueOptions
    from .fair import FairQueue
    from .tasks import Stream
    from .unfetched import Chunks

LEAST_WITH_ASYNC_SCHEDULING = 3
"""Two steps of a stream are in flight with async scheduling; a smaller credit holds streams that are not behind."""

RESUME_AT = 0.75
"""Share of ``per_stream_tasks`` that a held stream drains to. Let go at the first task that was sent, streams that are
all behind would take turns in steps of few of them, each as dear as a step of all."""

WIDE = 4
"""Times a limit on tasks that holds while nobody is slow. All streams are behind alike then, for want of processor
time, and leaving all of them out of steps in turn only costs more of it: 61 tasks of each of 128 streams were seen
where sends took a third more time than there was. It is a bound all the same: memory does not grow for ever."""


@dataclass(slots=True)
class OverLimit:
    """A running request whose stream is over a limit, and over which (``tasks``, ``unfetched``, ``total``)."""

    request: Any
    stream: Stream
    why: str


@dataclass(slots=True)
class Hold:
    """A hold that goes on from step to step. ``passing_at``: computed tokens when it expired, until they move."""

    why: str
    began_s: float
    fetches: int
    passing_at: int | None = None


def limits_of(options: SaveQueueOptions) -> Mapping[str, float]:
    """The limits that hold streams."""
    named = {
        "never": (),
        "bytes": ("total_bytes",),
        "always": ("per_stream_tasks", "unfetched_chunks", "total_tasks", "total_bytes"),
    }[options.holds]
    return {name: float(value) for name in named if (value := getattr(options, name)) is not None}


class Credits:
    """The holds of one scheduler; called on its thread alone.

    A hold is one step long and renewed at every step, so that nothing is left behind when a request is aborted, is
    preempted or ends while it is held.

    Args:
        scheduler: Upstream's scheduler: ``running``, ``current_step``.
        queue: The managed queue of its adapter.
        adapter: The adapter; its save thread is woken to look at shared memory.
        options: The limits.
        counters: The patch's counters.
    """

    def __init__(
        self, scheduler: Any, queue: FairQueue, adapter: Any, options: SaveQueueOptions, counters: dict[str, int]
    ) -> None:
        self._scheduler = scheduler
        self.queue = queue
        self._adapter = adapter
        self._options = options
        self._counters = counters
        self._holds: dict[str, Hold] = {}
        self._tokens_a_step = 1 + int(getattr(scheduler, "num_spec_tokens", 0) or 0)
        limits = limits_of(options)
        none = float("inf")  # a limit that is null, or holds nobody, is one that nothing reaches
        self._most_tasks = limits.get("per_stream_tasks", none)
        # What is sampled but not queued counts too: at most the steps in flight, which async scheduling keeps at two.
        queue.table.near_at = max(1, self._most_tasks - LEAST_WITH_ASYNC_SCHEDULING)
        self._most_unfetched = limits.get("unfetched_chunks", none)
        self._counts_unfetched = self._most_unfetched != none
        self._most_total = limits.get("total_tasks", none)
        self._most_bytes = limits.get("total_bytes", none)

    @property
    def is_holding(self) -> bool:
        """Whether anybody was held in the last step."""
        return bool(self._holds)

    def hold(self) -> None:
        """Leave the streams that are over out of the step that is about to be scheduled."""
        queue = self.queue
        running: Sequence[Any] = self._scheduler.running
        queue.sort_in()
        held: dict[str, OverLimit] = {}
        now = time.monotonic()
        queue.look_at_lanes(now)
        most_total = self._most_total if queue.slow.is_anybody_slow else WIDE * self._most_total
        if queue.table.near or self._holds or self._counts_unfetched:
            self._hold_those_over(held, now)
        # Each stream that is not held may add a task in this step, and those in flight are not queued yet.
        total, nbytes = queue.tasks, queue.nbytes_near(self._most_bytes)
        if queue.account.chunks is not None:
            nbytes -= queue.account.chunks.abandoned_nbytes  # they stay counted, and nobody is held for them
        most_coming = len(running) * LEAST_WITH_ASYNC_SCHEDULING
        is_heavy = nbytes >= self._most_bytes / 2
        if is_heavy or total + most_coming > most_total:
            coming = sum(map(self._placeholders, running))
            if is_heavy or total + coming + len(running) - len(held) > most_total:
                self._hold_those_with_most(held, most_total - total - coming, nbytes)
        if held or self._holds:
            self._apply(held, now)
        if queue.account.chunks is not None and (is_heavy or held):
            self._want_look(queue.account.chunks, held, is_heavy)

    def _want_look(self, chunks: Chunks, held: Mapping[str, OverLimit], is_heavy: bool) -> None:
        """Let a lane look soon where what was fetched since the last look, and counts still, matters."""
        is_waited_for = any(over.why == "unfetched" or (is_heavy and over.why == "total") for over in held.values())
        if not (is_heavy or is_waited_for) or not chunks.want(WANTED_LOOK_S if is_waited_for else NEAR_LOOK_S):
            return
        if not self.queue.helper.wake():
            with self._adapter._save_cond:
                self._adapter._save_cond.notify()

    def _placeholders(self, request: Any) -> int:
        """Steps of a request that were scheduled and have not ended."""
        placeholders = int(request.num_output_placeholders)
        return placeholders if self._tokens_a_step == 1 else -(-placeholders // self._tokens_a_step)

    def _hold_those_over(self, held: dict[str, OverLimit], now: float) -> None:
        """Hold each stream that is over its own limits."""
        streams = self.queue.streams
        for request in self._scheduler.running:
            stream = streams.get(request.external_req_id)
            if stream is None:
                continue
            hold = self._holds.get(request.request_id)
            least = self._most_tasks
            if not self.queue.slow.is_pressed and not self.queue.slow.is_slow(stream):
                least *= WIDE
            if hold is not None and hold.why == "tasks" and now - hold.began_s <= self._options.max_hold_s:
                least = int(least * RESUME_AT) + 1 if least != float("inf") else least
            # Whatever its status: one that waits for a chunk of its own may get it, and run, in this very step.
            if stream.tasks + self._placeholders(request) >= least and not getattr(request, "is_prefill_chunk", False):
                held[request.request_id] = OverLimit(request, stream, "tasks")
            elif stream.unfetched >= self._most_unfetched and stream.given_up_at != stream.fetches:
                held[request.request_id] = OverLimit(request, stream, "unfetched")

    def _hold_those_with_most(self, held: dict[str, OverLimit], tasks_room: float, nbytes: int) -> None:
        """Let streams run, those with the least first, as long as what they may add fits under the totals.

        A stream that has nothing on its way may always take a step: holding it would help nobody.
        """
        streams = self.queue.streams
        bytes_room = self._most_bytes - nbytes
        if tasks_room >= len(self._scheduler.running) and bytes_room >= self._largest_steps():
            return
        candidates: list[tuple[int, int, Stream | None, Any]] = []
        for order, request in enumerate(self._scheduler.running):
            if request.request_id in held:
                continue
            stream = streams.get(request.external_req_id)
            weight = 0 if stream is None else stream.tasks + stream.unfetched
            candidates.append((weight, order, stream, request))
        candidates.sort(key=lambda each: each[:2])
        for weight, _, stream, request in candidates:
            step_bytes = 0 if stream is None else stream.last_nbytes
            if stream is not None and weight and (tasks_room < 1 or bytes_room <= 0 or bytes_room < step_bytes):
                held[request.request_id] = OverLimit(request, stream, "total")
                continue
            tasks_room -= 1
            bytes_room -= step_bytes

    def _largest_steps(self) -> int:
        """Bytes that a step of all running streams adds if each adds as much as its last."""
        streams = self.queue.streams
        found = (streams.get(request.external_req_id) for request in self._scheduler.running)
        return sum(stream.last_nbytes for stream in found if stream is not None)

    def _apply(self, held: dict[str, OverLimit], now: float) -> None:
        holds: dict[str, Hold] = {}
        counters = self._counters
        # schedule() counts its step first and then leaves out whoever is eligible only later than that.
        step = self._scheduler.current_step + 2
        for request_id, over in held.items():
            request, stream = over.request, over.stream
            hold = self._holds.get(request_id)
            if hold is not None and hold.passing_at not in (None, request.num_computed_tokens):
                hold = None  # the step that it was let through was taken
            if hold is None:
                hold = Hold(over.why, now, stream.fetches)
                counters["holds"] += 1
                counters[f"holds_for_{over.why}"] += 1
            hold.why = over.why
            holds[request_id] = hold
            if hold.passing_at is None and now - hold.began_s > self._options.max_hold_s:
                # What it waits for may be waiting for what it keeps (KV blocks): one step goes through.
                hold.passing_at = request.num_computed_tokens
                counters["expired_holds"] += 1
                if over.why == "unfetched" and hold.fetches == stream.fetches:
                    # Nobody fetches: the request has ended at the next stage, or that stage stands still.
                    stream.given_up_at = stream.fetches
                    counters["given_up"] += 1
            if hold.passing_at is None:
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, step)
                counters["held_steps"] += 1
        self._holds = holds
