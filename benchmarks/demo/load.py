"""What every start of the demo is asked: two loads of `benchmarks.server`, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks.server.load import Load

SILENT = 3
"""Outputs of code2wav without audio before each one with it, as issue #4561 saw them."""

STREAMS = 32
REPLICAS = "4"
SHARE = 0.8
"""Of the requests a second that stock bore in the closed loop: the rate of the open one."""

STAGES: Mapping[str, Mapping[str, float]] = {
    "thinker": {"base_ms": 6.0},
    "talker": {"base_ms": 5.0},
    "code2wav": {"base_ms": 3.0, "silent": SILENT},
}
"""The simulated device's settings.

Steps are short ones, because that is where the patches have something to do: upstream's poll loop takes one raw output
from each replica a round and waits up to a millisecond at each that has none, so that a round over all replicas is
longer than a step of one of them, and its queue grows with every step. With the steps of a large model on one replica a
stage nothing queues, and nothing gets faster (``benchmarks.server``).
"""


def waves(*, quick: bool = False) -> Load:
    """A closed loop, which finds out what a server bears.

    Answers of one length would end together and be followed by requests that start together, which is a load of its
    own: lengths vary, the same way in every start.

    Args:
        quick: A small load, whose figures mean nothing.
    """
    usual = Load(levels=(STREAMS,), replicas=REPLICAS, vary=0.5)
    return dataclasses.replace(usual, levels=(4,), waves=2, tokens=20) if quick else usual


def paced(like: Load, rate: float) -> Load:
    """An open loop of such requests, half as many: the same arrivals for every start, *rate* of them a second."""
    [streams] = like.levels
    requests = like.count(streams) // 2
    return dataclasses.replace(like, loop="open", arrivals="even", levels=(rate,), requests=requests)
