"""Chunks that were put while all was calm, when nobody counts by stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fair import FairQueue
    from .receivers import Receivers
    from .unfetched import Book


class UncountedChunks:
    """Counts them when the calm has ended.

    Args:
        fair: Where streams and their chunks are counted.
        book: Upstream's list of segments in shared memory; None where there is none.
        receivers: Whose chunks somebody fetches.
        is_live: Whether more may be sent of a stream.
    """

    def __init__(
        self, fair: FairQueue, book: Book | None, receivers: Receivers, is_live: Callable[[str], bool]
    ) -> None:
        self.may_be = False
        """Whether there may be any."""
        self._fair = fair
        self._book = book
        self._receivers = receivers
        self._is_live = is_live

    def come(self) -> None:
        """The calm has ended, or a send that began in it."""
        self.may_be = self._book is not None

    def count(self) -> None:
        """Count those that are there by stream; on a lane's thread, a system call for each."""
        self.may_be = False
        chunks = self._fair.account.chunks
        if chunks is not None and self._book is not None:
            names = self._receivers.wanted(self._book.names())
            chunks.adopt(names, self._is_live, self._fair.table.came_unfetched)
