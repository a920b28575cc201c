"""What every start of the demo is asked: three loads of `benchmarks.server`, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks.server.load import Load

SILENT = 3
"""Outputs of code2wav without audio before each one with it, as issue #4561 saw them."""

STREAMS = 32
REPLICAS = 4
RATE = 10.0
"""Requests a second of the open loop."""

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


def loads(streams: int = STREAMS, replicas: int = REPLICAS, *, quick: bool = False) -> dict[str, Load]:
    """By name: ``alone``, one request after another; ``waves``, a closed loop; ``paced``, an open one.

    Answers of one length would end together and be followed by requests that start together, which is a load of its
    own: lengths vary, the same way in every start.

    Args:
        streams: Requests in flight in the closed loop.
        replicas: Of each stage.
        quick: A small load, whose figures mean nothing.
    """
    usual = Load(replicas=replicas, tokens=20 if quick else 100, vary=0.5)
    return {
        "alone": dataclasses.replace(usual, levels=(1,), requests=2 if quick else 6),
        "waves": dataclasses.replace(usual, levels=(streams,), waves=2 if quick else 4),
        "paced": dataclasses.replace(usual, loop="open", arrivals="even", levels=(RATE,), requests=6 if quick else 50),
    }
