"""How many asyncio tasks and memory blocks of Python a server's processes have: a plugin that writes them down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.trust import distribution

VARIABLE = "TEST_TRUST_COUNTS"
EVERY_S = 2.0


def plugin(folder: Path) -> dict[str, str]:
    """Write the distribution that vLLM loads into the folder; the result is what the server's environment needs."""
    entry_points = "[vllm.general_plugins]\ntrust_counts = tests.trust.counts:arm\n"
    return {"PYTHONPATH": distribution(folder, "trust_counts", entry_points), VARIABLE: str(folder)}


def arm() -> None:
    """Write this process's counts every few seconds, from one thread more, in every arm alike."""
    folder = os.environ.get(VARIABLE)
    if folder:
        threading.Thread(target=_write, args=(Path(folder) / f"{os.getpid()}.json",), daemon=True).start()


def _write(path: Path) -> None:
    new = path.with_suffix(".new")
    while True:
        with contextlib.suppress(RuntimeError, OSError):  # the first: a task began while they were gone through
            everything: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]  # of every loop; Python 3.11's
            tasks = sum(not task.done() for task in list(everything))
            new.write_text(json.dumps({"tasks": tasks, "blocks, 1000s": sys.getallocatedblocks() / 1000}))
            new.replace(path)
        time.sleep(EVERY_S)


def read(folder: Path, pid: int) -> dict[str, float]:
    """What a process wrote last; nothing of one that has no such plugin."""
    with contextlib.suppress(OSError):
        return dict(json.loads((folder / f"{pid}.json").read_text()))
    return {}
