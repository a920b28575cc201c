"""Chunks in shared memory that the next stage has not fetched.

The receiver unlinks a segment when it has read it, chunks of a stream in their order; nobody tells the sender. Looking
is a system call, so the save threads do it, never the scheduler's; few are needed, since what is gone comes first.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory is on Linux; upstream's connector looks there too
LOOK_S = 1.0
"""Between two looks where no limit is near. Each system call gives the interpreter's lock away: with ten looks a second
at 128 streams a chunk cost 7 % more processor time."""
NEAR_LOOK_S = 0.1
"""The same while half of the bytes are used up."""
WANTED_LOOK_S = 0.002
"""The same while the scheduler holds a stream for what was not fetched, as often as it schedules."""
ABANDONED_S = 60.0
"""Time after a stream's end after which chunks that nobody fetched are not counted: their receiver is gone."""

_MANY = 64
"""Chunks of a stream from which on each send looks at it where no limit says so."""


def size_of(name: str) -> int:
    """Bytes of a segment; 0 when it is not there (any more)."""
    try:
        return os.stat(f"{FOLDER}/{name}").st_size  # noqa: PTH116 - as below
    except FileNotFoundError:
        return 0


def _is_there(name: str) -> bool:
    return os.path.exists(f"{FOLDER}/{name}")  # noqa: PTH110 - a quarter of the time of a Path


@dataclass(slots=True)
class _Segments:
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    nbytes: int = 0
    ended_s: float | None = None


class Chunks:
    """The unfetched chunks of one sender.

    Args:
        gone: Told a stream, how many of its chunks count no longer, and whether they were fetched.
        abandoned: Told how many chunks were given up.
        look_at: Count of a stream from which on each send looks at it, so that nobody is held for chunks long gone.
    """

    def __init__(
        self,
        gone: Callable[..., None],
        abandoned: Callable[[int], None],
        look_at: int | None = None,
    ) -> None:
        self.nbytes = 0
        self._gone = gone
        self._abandoned = abandoned
        self._look_at = look_at or _MANY
        self._streams: dict[str, _Segments] = {}
        self._lock = threading.Lock()
        self._last_look_s = 0.0
        self._next_look_s = 0.0

    def put(self, stream: str, name: str, size: int) -> None:
        """A send of this stream left a segment of that name and so many bytes; the caller counts it."""
        with self._lock:
            segments = self._streams.get(stream)
            if segments is None:
                segments = self._streams[stream] = _Segments()
            elif segments.ended_s is not None:
                # A new request has an old one's external id: what was counted is gone, under names that come again.
                self._forget(stream, segments)
                segments.ended_s = None
            segments.waiting.append((name, size))
            segments.nbytes += size
            self.nbytes += size
            if len(segments.waiting) >= self._look_at:
                self._drop_fetched(stream, segments)

    def ended(self, stream: str) -> None:
        """The stream sends nothing more; its chunks were unlinked or wait for their receiver."""
        with self._lock:
            segments = self._streams.get(stream)
            if segments is not None:
                segments.ended_s = time.monotonic()
                self._drop_fetched(stream, segments)

    def want(self, within_s: float) -> bool:
        """Look so soon after the last look; whether it is time already and a save thread should be woken for it."""
        self._next_look_s = min(self._next_look_s, self._last_look_s + within_s)
        return bool(self._streams) and time.monotonic() >= self._next_look_s

    def look(self, now: float) -> None:
        """Look at every stream if it is time to; called by the lanes, which never wait for it."""
        if now < self._next_look_s or not self._streams or not self._lock.acquire(blocking=False):
            return
        try:
            for stream in list(self._streams):
                segments = self._streams[stream]
                self._drop_fetched(stream, segments)
                if segments.ended_s is not None and now - segments.ended_s > ABANDONED_S and segments.waiting:
                    self._abandon(stream, segments)
            self._last_look_s = time.monotonic()
            self._next_look_s = self._last_look_s + LOOK_S
        finally:
            self._lock.release()

    def _drop_fetched(self, stream: str, segments: _Segments) -> None:
        waiting = segments.waiting
        gone = bisect_left(
            range(len(waiting)), 1, key=lambda place: _is_there(waiting[place][0])
        )  # in order, as they came
        for _ in range(gone):
            _, size = waiting.popleft()
            segments.nbytes -= size
            self.nbytes -= size
        if gone:
            self._gone(stream, gone, fetched=True)
        if not waiting:
            del self._streams[stream]

    def _abandon(self, stream: str, segments: _Segments) -> None:
        self._abandoned(len(segments.waiting))
        self._forget(stream, segments)
        del self._streams[stream]

    def _forget(self, stream: str, segments: _Segments) -> None:
        self._gone(stream, len(segments.waiting), fetched=False)
        self.nbytes -= segments.nbytes
        segments.waiting.clear()
        segments.nbytes = 0
