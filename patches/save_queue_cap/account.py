"""Bytes that are on their way: of queued payloads, each storage once, and of chunks that were not fetched.

What is weighed is what still waits when it may matter: most tasks are sent before. Copies are made where a payload must
not wait as it is: in the runner's own memory, or as the last bit of a batch that it keeps alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from omni_fastpath.ledger import logger

from .payload import NO_BYTES, keep, weigh
from .storage import Storage
from .streams import CROWD
from .tasks import QueuedTask
from .unfetched import Chunks
from .upstream import PAYLOAD

WEIGH_S = 0.1
"""Between two times that what waits is weighed while its bytes are far from their limit."""

WAITED_S = 0.25
"""Time after which a task has really waited, and is looked at for a batch that it alone keeps alive."""

_AGAIN_S = 1.0

Wanted = Callable[[int], bool]


class Account:
    """The bytes of one managed queue.

    Args:
        lock: The queue's.
        counters: The patch's counters; written under the lock.
        chunks: What shared memory still holds of each stream; None where it cannot be known.
    """

    def __init__(self, lock: threading.Lock, counters: dict[str, int], chunks: Chunks | None = None) -> None:
        self.chunks = chunks
        self.storage = Storage()
        self.fresh: list[QueuedTask] = []
        """Queued and not weighed, some of them sent since."""
        self._lock = lock
        self._counters = counters
        self._aging: deque[tuple[float, QueuedTask]] = deque()  # weighed, to be looked at again by then
        self._next_weighing_s = 0.0
        self._task_nbytes = float("inf")  # of those that were weighed last, each
        self._next_look_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that were weighed and still wait or are in flight, and those that were not fetched."""
        return self.storage.nbytes + (self.chunks.nbytes if self.chunks is not None else 0)

    def note_most(self) -> None:
        """Write the most that it came to; under the lock."""
        self._counters["max_outstanding_bytes"] = max(self._counters["max_outstanding_bytes"], self.nbytes)

    # ---- Weighing; under the lock ----

    def weigh(self) -> None:
        """Weigh what came since the last time and still waits."""
        fresh, self.fresh = self.fresh, []
        count, before = 0, self.storage.nbytes
        for queued in fresh:
            if queued.is_waiting and queued.task is not None:
                count += 1
                self._weigh_one(queued, queued.task)
                self._aging.append((queued.since_s + WAITED_S, queued))
        if count:
            self._task_nbytes = (self.storage.nbytes - before) / count
        self.note_most()

    def weigh_near(self, limit: float) -> None:
        """Weigh what came lately only where it may matter for a limit, or has not been for a while."""
        fresh = len(self.fresh)
        if fresh:
            now = time.monotonic()
            if now >= self._next_weighing_s or self.nbytes + fresh * self._task_nbytes >= limit / 2:
                self._next_weighing_s = now + WEIGH_S
                self.weigh()

    def _weigh_one(self, queued: QueuedTask, task: Mapping[str, Any]) -> None:
        try:
            weight = weigh(task.get(PAYLOAD))
        except Exception:  # a kind of tensor that cannot be looked at: it is sent all the same
            logger.exception("omni-fastpath: save_queue_cap could not weigh a payload of %s", queued.stream.key)
            weight = NO_BYTES
        queued.weight = weight
        queued.stream.last_nbytes = self.storage.add(weight) or queued.stream.last_nbytes

    def trim(self, queued: int) -> None:
        """So many tasks are queued: do not remember many more."""
        if len(self.fresh) > 2 * queued + CROWD:
            self.fresh = [each for each in self.fresh if each.is_waiting]

    def take_all_that_waits(self) -> list[QueuedTask]:
        """Weigh everything; what waits and has not been given out here before."""
        self.weigh()
        found = [queued for _, queued in self._aging if queued.is_waiting]
        self._aging.clear()
        return found

    def forget(self) -> None:
        """Nothing waits."""
        self.fresh.clear()
        self._aging.clear()

    def close(self) -> None:
        """Nothing waits or is in flight."""
        self.forget()
        self.storage = Storage()

    # ---- Copies; on any thread, not under the lock ----

    def replace(self, wanted: list[tuple[QueuedTask, Wanted | None]]) -> None:
        """Give tasks that wait a copy of their payloads, or of the parts that are wanted."""
        kept = []
        for queued, which in wanted:
            task = queued.task
            if queued.is_waiting and task is not None:
                payload, copies = keep(task.get(PAYLOAD), which)  # a clean-up has none
                if copies:
                    kept.append((queued, task, payload, weigh(payload), copies))
        if not kept:
            return
        with self._lock:  # once: each time may be a wait for a lane, and for the interpreter's lock after it
            for queued, task, payload, weight, copies in kept:
                if queued.is_waiting and queued.weight is not None:
                    self.storage.remove(queued.weight)
                    queued.weight = weight
                    task[PAYLOAD] = payload
                    self.storage.add(weight)
                    self._counters["copied_tensors"] += copies

    def look_between_sends(self, now: float) -> None:
        """On a lane's thread: look at shared memory, and let batches go that a task or two keep alive."""
        if self.chunks is not None:
            self.chunks.look(now)
        if now >= self._next_look_s and (self.fresh or self._aging):
            self._next_look_s = now + WEIGH_S
            with self._lock:
                self.weigh()
            if self._aging and self._aging[0][0] <= now:
                self.let_batches_go(now)

    def let_batches_go(self, now: float) -> None:
        """Copy what has waited while most of the batch that it is a part of has left."""
        thin: list[tuple[QueuedTask, Wanted | None]] = []
        with self._lock:
            aging, is_thin = self._aging, self.storage.is_thin
            for _ in range(len(aging)):
                if aging[0][0] > now:
                    break
                _, queued = aging.popleft()
                if queued.is_waiting and queued.weight:
                    if any(map(is_thin, queued.weight)):
                        thin.append((queued, frozenset(filter(is_thin, queued.weight)).__contains__))
                    else:
                        aging.append((now + _AGAIN_S, queued))
        self.replace(thin)
