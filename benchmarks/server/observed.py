"""What the simulated device's observer saw in the API processes of a server since it was last asked."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FRONT_END, ORCHESTRATOR = "MainThread", "orchestrator"
"""Names of the threads of an API process whose event loops matter."""

Seen = Mapping[str, Any]
"""As `omni_simulated_device.observe` says it."""

_WAIT_S = 10.0


def ask(folder: Path, pids: Iterable[int]) -> list[Seen]:
    """What was seen in each of these processes, which is forgotten there.

    Raises:
        OSError: A process is not observed, or does not answer.
    """
    return [_ask(folder / f"{pid}.sock") for pid in pids]


def _ask(path: Path) -> Seen:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_WAIT_S)
        connection.connect(str(path))
        with connection.makefile("rb") as answer:
            found: Seen = json.load(answer)
            return found


LONGEST = {
    FRONT_END: ("front end longest callback, ms CPU", "front end longest callback, ms"),
    ORCHESTRATOR: ("orchestrator longest callback, ms CPU", "orchestrator longest callback, ms"),
}
"""By thread: its own time, and the wall clock's."""
COLLECTIONS, COLLECTED = "collections of the oldest generation", "longest collection, ms"
FIGURES = (*LONGEST[FRONT_END], *LONGEST[ORCHESTRATOR], COLLECTIONS, COLLECTED)


def figures(seen: Iterable[Seen]) -> dict[str, float]:
    """`FIGURES` of all API processes: the longest of any, and the sum of collections; NaN where nothing was seen."""
    found = dict.fromkeys(FIGURES, math.nan)

    def longest(name: str, value: float) -> None:
        found[name] = value if math.isnan(found[name]) else max(found[name], value)

    for each in seen:
        for thread, (cpu, wall) in LONGEST.items():
            if thread in each["loops"]:
                loop = each["loops"][thread]
                longest(cpu, max((callback["cpu_ms"] for callback in loop["longest"]), default=0.0))
                longest(wall, loop["longest_wall_ms"])
        count = each["collections"]["count"]
        found[COLLECTIONS] = count if math.isnan(found[COLLECTIONS]) else found[COLLECTIONS] + count
        longest(COLLECTED, each["collections"]["longest_ms"])
    return found
