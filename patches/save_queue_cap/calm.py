"""Until when all is calm, and bytes meanwhile: nobody weighs each task then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .payload import weigh
from .unfetched import LOOK_S, NEAR_LOOK_S, Book, size_of
from .upstream import PAYLOAD

STEPS_UNLIMITED = 1000
"""Age at which the calm ends where ``per_stream_tasks`` is null."""

QUIET_S = 0.5
"""Without unrest for so long, a managed queue is calm again."""

AGAIN = 2 / 3
"""Share of the bytes that end the calm below which it may begin again: sorting thousands of tasks in takes a step."""

_LOOK_S = 0.25
_NO_LIMIT = float("inf")
_SAMPLE = 32


@dataclass(frozen=True)
class Calm:
    """Until when a queue is calm.

    Attributes:
        steps: Age of the oldest unsent task, in steps that appended. Below 1 the queue is managed always.
        tasks: Queued tasks of all streams.
        nbytes: Bytes queued and not fetched.
        most_nbytes: Bytes that may not be reached, whatever has been fetched of them since somebody looked.
        quiet_s: How long without unrest a managed queue must be.
    """

    steps: int = STEPS_UNLIMITED
    tasks: float = float("inf")
    nbytes: float = float("inf")
    most_nbytes: float = float("inf")
    quiet_s: float = QUIET_S


class CalmBytes:
    """Bytes on their way while all is calm: looked at by the first lane now and then, reckoned in between.

    Args:
        calm: What ends the calm.
        book: Upstream's list of segments in shared memory; None where there is none.
        fetched_by_somebody: Of names of segments, those that somebody may fetch.
    """

    def __init__(
        self, calm: Calm, book: Book | None, fetched_by_somebody: Callable[[Iterable[str]], list[str]]
    ) -> None:
        self.next_look_s = 0.0
        """When the lane looks again, monotonic seconds."""
        self.seen_nbytes = 0
        """Queued and not fetched, by the last look."""
        self._calm = calm
        self._book = book
        self._fetched_by_somebody = fetched_by_somebody
        self._seen_tasks = 0  # queued then
        self._task_nbytes = 0.0  # of each of them
        self._newest_nbytes = 0  # of the greatest newest task of a step since
        self._unfetched = 0  # bytes, by the last count
        self._put_by_then = 0
        self._next_count_s = 0.0

    def begin(self, nbytes: int, tasks: int) -> None:
        """All is calm again, with so much on its way."""
        self.seen_nbytes = self._unfetched = nbytes
        self._seen_tasks = tasks
        self._put_by_then = self._book.transferred if self._book is not None else 0
        self.next_look_s = self._next_count_s = 0.0

    def is_too_much_to_begin(self, nbytes: int) -> bool:
        """Whether so much on its way keeps a managed queue from being calm."""
        return nbytes >= AGAIN * self._calm.nbytes

    def is_light(self, inbox: deque[dict[str, Any]], tasks: int) -> bool:
        """On the scheduler's thread, with so many tasks queued: whether bytes do not end the calm.

        The newest task of each step says how dear those are that came since the last look: a look comes four times a
        second, and what queues meanwhile (prompts) may be of another size than what it saw. Where they may be too
        much they are looked at here.
        """
        nbytes = self._calm.nbytes
        if self.seen_nbytes >= nbytes:
            return False
        put = self._book.transferred - self._put_by_then if self._book is not None else 0
        grown = tasks - self._seen_tasks
        if grown > 0 and nbytes != _NO_LIMIT:
            self._newest_nbytes = max(self._newest_nbytes, _newest(inbox))
            if self.seen_nbytes + put + grown * max(self._task_nbytes, self._newest_nbytes) >= nbytes:
                self._see(list(inbox))
        most = self.seen_nbytes + put
        if most >= nbytes:
            if self.seen_nbytes >= nbytes or most >= self._calm.most_nbytes:
                return False
            self.next_look_s = self._next_count_s = 0.0  # the lane looks at once what of it was fetched
        return True

    def look(self, now: float, tasks: Sequence[dict[str, Any]]) -> None:
        """On the first lane's thread: these are queued; count what was not fetched, if it is time to."""
        self.next_look_s = now + _LOOK_S
        is_counted = self._book is not None and now >= self._next_count_s
        if self._book is not None and is_counted:
            put = self._book.transferred
            self._unfetched = self.count_unfetched()
            self._put_by_then = put
        self._see(tasks)
        if is_counted:
            self._next_count_s = now + (NEAR_LOOK_S if self.seen_nbytes >= self._calm.nbytes / 2 else LOOK_S)

    def _see(self, tasks: Sequence[dict[str, Any]]) -> None:
        """These are queued."""
        queued = estimate(tasks)
        self.seen_nbytes = queued + self._unfetched
        self._seen_tasks = len(tasks)
        self._task_nbytes = queued / len(tasks) if tasks else 0.0
        self._newest_nbytes = 0

    def count_unfetched(self) -> int:
        """Bytes in shared memory for which somebody may come; a system call for each segment."""
        return sum(map(size_of, self._fetched_by_somebody(self._book.names()))) if self._book is not None else 0


def _newest(inbox: deque[dict[str, Any]]) -> int:
    """Bytes of the tensors of the newest task; 0 where a lane has taken it, or it cannot be looked at."""
    try:
        return sum(viewed for _, viewed in weigh(inbox[-1].get(PAYLOAD)).values())
    except Exception:
        return 0


def estimate(tasks: Sequence[dict[str, Any]]) -> int:
    """Bytes that these keep alive, by a sample: one task of a step says what its whole batch is."""
    sample = tasks[:: max(1, len(tasks) // _SAMPLE)]
    shared = own = views = 0
    seen = set()
    for task in sample:
        try:
            weight = weigh(task.get(PAYLOAD))
        except Exception:  # noqa: S112 - a kind of tensor that cannot be looked at: it is sent all the same
            continue
        for address, (nbytes, viewed) in weight.items():
            views += viewed if viewed < nbytes else 0
            if address not in seen:
                seen.add(address)
                if viewed < nbytes:
                    shared += nbytes
                else:
                    own += nbytes
    # Steps that no sampled task is of: at least what their tasks see of their batches.
    shared = max(shared, views * len(tasks) // max(1, len(sample)))
    return shared + own * len(tasks) // max(1, len(sample))
