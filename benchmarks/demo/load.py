"""What the demo's servers are asked: two loads of `benchmarks.server`, with its step times and answers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.server.load import Load

STREAMS = 64
REPLICAS = "4"
WAVES = 2
SHARE = 0.8
"""Of the median of the requests per second that stock sustained in the closed loop: the rate of the open one."""


def waves(*, quick: bool = False) -> Load:
    """A closed loop, which finds out what a server sustains.

    Answers of one length would end together and be followed by requests that start together, which is a load of its
    own. So lengths vary, the same way in every start.

    Args:
        quick: A small load, whose figures mean nothing.
    """
    usual = Load(levels=(STREAMS,), replicas=REPLICAS, vary=0.5, waves=WAVES)
    return dataclasses.replace(usual, levels=(4,), tokens=20) if quick else usual


def paced(like: Load, sustained: Sequence[float]) -> Load:
    """An open loop of such requests, a third as many, evenly spaced and the same for every start.

    Args:
        like: The closed loop.
        sustained: The requests per second of all of stock's starts in it.
    """
    [streams] = like.levels
    rate = round(SHARE * statistics.median(sustained), 1)
    return dataclasses.replace(like, loop="open", arrivals="even", levels=(rate,), requests=like.count(streams) // 3)
