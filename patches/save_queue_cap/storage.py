"""Bytes that queued payloads keep alive: each storage once, however many tasks have a part of it."""

from __future__ import annotations

from .payload import Weight

THIN = 0.5
"""Share of a storage that queued tasks still have of it below which copying them out lets most of it go."""


class Storage:
    """The storages that queued tasks keep alive. Not for several threads at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._found: dict[int, list[int]] = {}  # address: bytes, tasks that have it, bytes that these have of it

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, weight: Weight) -> int:
        """Count a task's; the bytes that no other task kept alive."""
        before = self.nbytes
        for address, (nbytes, viewed) in weight.items():
            found = self._found.get(address)
            if found is None:
                self._found[address] = [nbytes, 1, viewed]
                self.nbytes += nbytes
            else:
                found[1] += 1
                found[2] += viewed
        return self.nbytes - before

    def remove(self, weight: Weight) -> None:
        """Count a task's no longer."""
        for address, (_, viewed) in weight.items():
            found = self._found[address]
            if found[1] == 1:
                del self._found[address]
                self.nbytes -= found[0]
            else:
                found[1] -= 1
                found[2] -= viewed

    def is_thin(self, address: int) -> bool:
        """Whether what is queued of a storage is less than half of it."""
        found = self._found.get(address)
        return found is not None and found[2] < found[0] * THIN
