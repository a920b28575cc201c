"""Whose turn it is: arms alternate, forwards and backwards, so that what drifts on the machine hits all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Round and arm in the order of running: A B, B A, A B, ... for two arms; a round has each arm once."""
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield number, arm
