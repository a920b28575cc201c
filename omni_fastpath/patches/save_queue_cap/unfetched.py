"""Bytes of chunks that are in shared memory because the next stage has not fetched them.

The receiver unlinks a segment when it has read it, in order within a stream, and does not report it. Checking is a
system call, so the save thread does it and not the scheduler's, and only for streams that have chunks there.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

ABANDONED_S = 60.0
"""Seconds without a fetch and without a task of the stream, after which its chunks stop counting. Its request has ended
and its receiver is gone. A held stream takes a step, and has a task, each time that a hold expires."""


def exists(name: str) -> bool:
    """Whether there is a segment of this name."""
    return os.path.exists(f"/dev/shm/{name}")  # noqa: S108, PTH110 - upstream checks there too, and a Path takes 4 times as long


@dataclass(slots=True)
class _Chunks:
    """Chunks of one stream: the first's number, all sizes in order, and when one was last fetched or a task sent."""

    stem: str
    first: int
    moved_s: float
    sizes: deque[int] = field(default_factory=deque)
    nbytes: int = 0


class Unfetched:
    """The unfetched chunks of one sender. Only the save thread changes it. Other threads read sizes.

    Args:
        exists: Whether there is a segment of this name.
    """

    def __init__(self, exists: Callable[[str], bool] = exists) -> None:
        self.nbytes = 0
        """Size of all streams, as of the last check."""
        self._exists = exists
        self._streams: dict[str, _Chunks] = {}

    def of(self, stream: str) -> int:
        """Size of one stream, as of the last check."""
        chunks = self._streams.get(stream)
        return 0 if chunks is None else chunks.nbytes

    def put(self, stream: str, stage: int, number: int, nbytes: int, now: float) -> None:
        """Note that the chunk of this number was put."""
        chunks = self._streams.get(stream)
        if chunks is not None and chunks.first + len(chunks.sizes) != number:
            self._forget(stream, chunks)  # a new request has an old one's external id and reuses its names
            chunks = None
        if chunks is None:
            chunks = self._streams[stream] = _Chunks(f"{stream}_{stage}_", number, now)
        chunks.moved_s = now
        chunks.sizes.append(nbytes)
        chunks.nbytes += nbytes
        self.nbytes += nbytes

    def sent(self, stream: str, now: float) -> None:
        """Note that a task of the stream was sent without a chunk."""
        chunks = self._streams.get(stream)
        if chunks is not None:
            chunks.moved_s = now

    def check(self, now: float) -> None:
        """Find what was fetched, by a few system calls for each stream that has chunks there."""
        for stream, chunks in list(self._streams.items()):
            gone = self._gone(chunks)
            for _ in range(gone):
                nbytes = chunks.sizes.popleft()
                chunks.first += 1
                chunks.nbytes -= nbytes
                self.nbytes -= nbytes
            if gone:
                chunks.moved_s = now
            if not chunks.sizes or now - chunks.moved_s > ABANDONED_S:
                self._forget(stream, chunks)

    def _gone(self, chunks: _Chunks) -> int:
        """How many of the first chunks are gone."""
        numbers = range(len(chunks.sizes))
        return bisect_left(numbers, 1, key=lambda each: self._exists(f"{chunks.stem}{chunks.first + each}"))

    def _forget(self, stream: str, chunks: _Chunks) -> None:
        del self._streams[stream]
        self.nbytes -= chunks.nbytes
