"""What waits in a stage's save queue: counted when somebody looks, every two seconds, and never by the stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from .upstream import payload_of, tasks_in

SAMPLE = 64
"""Tasks that are weighed; ten thousand of them would keep the stage from its interpreter for tens of milliseconds."""


def tasks(queue: Any) -> int:
    """How many wait, whoever's queue it is."""
    return len(queue) if type(queue) is not deque else len(_waiting(queue))


def nbytes(queue: Any) -> int | None:
    """Bytes of the tensors that wait, from a sample; None of a queue that is no deque of upstream's."""
    if type(queue) is not deque:
        return None
    waiting = _waiting(queue)
    if not waiting:
        return 0
    every = -(-len(waiting) // SAMPLE)
    sample = waiting[::every]
    return sum(_weigh(payload_of(task)) for task in sample) * len(waiting) // len(sample)


def _waiting(queue: deque[Any]) -> list[Any]:
    entries = list(queue)  # in one step of the interpreter: no other thread changes it meanwhile
    return [task for entry in entries for task in tasks_in(entry)]


def _weigh(payload: Any) -> int:
    """Bytes of a payload's tensors; of no other value, which are small."""
    found, left = 0, [payload]
    for value in left:
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        else:
            size = getattr(value, "nbytes", 0)
            found += size if isinstance(size, int) else 0
    return found
