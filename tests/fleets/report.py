"""What both kinds of fleets share: a seed's verdict, and where two sequences differ."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Verdict:
    """What was found about one seed.

    Attributes:
        seed: Its seed.
        about: The fleet in a few words.
        wrong: What is wrong with ours; none: it passed.
        counts: How many requests ended how, and so on.
        log: What happened in each arm, a line each.
    """

    seed: int
    about: str
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)


def difference(one: Sequence[Any], other: Sequence[Any], *, complete: bool) -> str | None:
    """The first difference of two sequences; None if they are equal, or, unless complete, one begins the other."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            pairs = enumerate(zip(f"{a!r}", f"{b!r}", strict=False))
            at = max(0, next((n for n, (x, y) in pairs if x != y), 0) - 60)
            words, others = (f"{each!r}"[at : at + 160] for each in (a, b))
            return f"{len(one)} and {len(other)}, {place} is {words} and {others}"
    return f"{len(one)} and {len(other)}" if complete and len(one) != len(other) else None


@contextmanager
def quiet() -> Iterator[None]:
    """No logger says anything: failures are made by the thousand."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
