"""What the best order could reach: the mean residence of the top class in a priority queue.

Non-preemptive priority M/G/1 (A. Cobham, "Priority assignment in waiting line problems", 1954). With arrival rates
``r_i``, service times ``S_i``, utilisations ``u_i = r_i E[S_i]`` and the top class ``t``::

    W0 = Σ r_i E[S_i²] / 2          mean remaining service of whatever is being served
    W  = W0 / (1 - u_t)             mean wait of the top class
    T  = W + E[S_t]                 mean residence

It assumes Poisson arrivals, one server, and that an arrival is seen at once. Under overload (Σu ≥ 1) the server never
rests and the classes below get what the top leaves: their rates are scaled so that Σu = 1.

The first-in-first-out queue of the same load (Pollaczek and Khinchine) waits ``W0 / (1 - u)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """One class of raw outputs.

    Attributes:
        rate: Arrivals a second, r.
        mean: Mean service time in seconds, E[S].
        second: Second moment of the service time in square seconds, E[S²].
    """

    rate: float
    mean: float
    second: float

    @property
    def utilisation(self) -> float:
        """``u = r E[S]``."""
        return self.rate * self.mean

    def with_overhead(self, seconds: float) -> Service:
        """The same class with a constant added to each service: what receiving, decoding and dispatching cost."""
        return Service(self.rate, self.mean + seconds, self.second + 2 * seconds * self.mean + seconds * seconds)

    def scaled(self, factor: float) -> Service:
        """The same class with another rate."""
        return Service(self.rate * factor, self.mean, self.second)


def remaining(classes: Sequence[Service]) -> float:
    """W0: mean remaining service time that an arrival finds, seconds."""
    return sum(each.rate * each.second for each in classes) / 2


def top_class_wait(top: Service, others: Sequence[Service]) -> float:
    """W: mean wait of the top class, seconds; infinite when it alone fills the server."""
    left = 1 - top.utilisation
    if left <= 0:
        return math.inf
    below = sum(each.utilisation for each in others)
    if below > left:
        others = [each.scaled(left / below) for each in others]
    return remaining([top, *others]) / left


def fifo_wait(classes: Sequence[Service]) -> float:
    """Mean wait in a first-in-first-out queue, seconds; infinite under overload."""
    left = 1 - sum(each.utilisation for each in classes)
    return remaining(classes) / left if left > 0 else math.inf
