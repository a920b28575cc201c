"""The content of ``/dev/shm``: the used share, chunks of this server's requests, and chunks that are never fetched."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from time import time

FOLDER = "/dev/shm"  # noqa: S108 - where upstream's connector puts chunks
_CHUNK = re.compile(r"(?P<request>.+)_(?P<stage>\d+)_\d+")
"""The name of a chunk: a request, the stage that sent it, and a number. Its lock has no data and is not counted."""
_LOST_S = 600.0
"""The age at which a chunk of an unknown request counts as never fetched, because upstream gives up a request that
waits that long for a chunk. Requests of another server are never known."""


def content(requests: Collection[str], stages: int) -> Iterator[tuple[str, float, dict[str, str]]]:
    """The used share, the bytes of the chunks of these requests by stage, and the number that are never fetched.

    Empty if there is no such folder.
    """
    sizes, orphans = Counter[str](), 0
    with contextlib.suppress(OSError), os.scandir(FOLDER) as files:
        for file in islice(files, 10_000):
            name = _CHUNK.fullmatch(file.name)
            with contextlib.suppress(OSError):  # it was fetched meanwhile
                if name is not None and file.is_file(follow_symlinks=False):
                    if name["request"] in requests:
                        sizes[name["stage"]] += file.stat().st_size
                    else:
                        orphans += time() - file.stat().st_mtime > _LOST_S
        room = os.statvfs(FOLDER)
        yield "shared_memory_used_ratio", 1 - room.f_bfree / room.f_blocks, {}
        yield "shared_memory_orphans", orphans, {}
        for stage in map(str, range(stages)):
            yield "shared_memory_chunk_bytes", sizes[stage], {"stage": stage}
