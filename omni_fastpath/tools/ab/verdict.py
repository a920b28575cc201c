"""Whether two arms differ: an exact rank test over *starts*, and the interval of ratios that belongs to it.

A start (a server, a process) is the unit: requests of one start share its luck, so that thousands of them are still one
sample. Tested with Mann and Whitney's U, exactly and two-sided; the interval holds every ratio B / A that the same test
would not reject (Hodges and Lehmann, Annals of Mathematical Statistics 34, 1963), so that verdict and interval agree.

One measure is named primary beforehand and has ``PRIMARY_ALPHA`` for itself; the others share ``OTHERS_ALPHA`` by
Holm's procedure (Scandinavian Journal of Statistics 6, 1979). Both together: one false verdict in at most 5 % of
comparisons of an arm with itself.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from omni_fastpath.tools.ab.quantiles import quantile

PRIMARY_ALPHA = 0.03
"""Four starts an arm can reach p = 0.029, for one measure and no more."""

OTHERS_ALPHA = 0.02

STARTS = 6
"""Starts an arm unless told otherwise: p = 0.0022 can be reached, so that nine other measures have a chance."""

Better = Literal["higher", "lower"]
Word = Literal["better", "worse", "the same", "too few starts"]


@dataclass(frozen=True)
class Measure:
    """What is compared.

    Attributes:
        name: As tables show it.
        unit: Of its values; empty for a count.
        better: Which way is better.
    """

    name: str
    unit: str
    better: Better


@dataclass(frozen=True)
class Verdict:
    """What can be said of one measure.

    Attributes:
        word: ``better`` or ``worse`` (B against A), ``the same`` (no difference was found: the interval says how large
            a one may have been missed), or ``too few starts``, with which no difference could have been found.
        ratio: As ``ratio`` says it.
        interval: The ratios that the test does not reject; zero to infinity with too few starts.
        p: Two-sided and exact.
        threshold: What ``p`` had to be at most.
    """

    word: Word
    ratio: float
    interval: tuple[float, float]
    p: float
    threshold: float

    def __str__(self) -> str:
        """As tables show it: the word, and what it rests on."""
        if self.word == "too few starts":
            return self.word
        low, high = self.interval
        ratios = f"{low:.2f} to {high:.2f}, " if math.isfinite(high) else ""
        return f"{self.word} ({ratios}p {self.p:.3f} of {self.threshold:.3f})"


def verdicts(
    primary: Measure, measures: Sequence[Measure], a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]
) -> dict[str, Verdict]:
    """The verdict of every measure, B against A.

    Args:
        primary: The measure that was named beforehand.
        measures: All measures, the primary one among them; names are unique.
        a: Measure's name to a value for each start of A.
        b: The same of B.

    Raises:
        ValueError: An arm without a start, a value that is no number, or a primary measure that is not among them.
    """
    if primary not in measures:
        raise ValueError(f"the primary measure {primary.name!r} is not among {[each.name for each in measures]}")
    for measure in measures:
        for arm, values in (("A", a[measure.name]), ("B", b[measure.name])):
            if not values or any(math.isnan(value) for value in values):
                raise ValueError(f"{measure.name}: {arm} has {list(values)}, allowed: a number for each start")
    p = {measure.name: p_value(a[measure.name], b[measure.name]) for measure in measures}
    thresholds = _holm({name: each for name, each in p.items() if name != primary.name})
    thresholds[primary.name] = PRIMARY_ALPHA
    return {
        each.name: _verdict(each, a[each.name], b[each.name], p[each.name], thresholds[each.name]) for each in measures
    }


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Mann and Whitney's two-sided p, exact: where values are equal, of all permutations of the ties."""
    from scipy.stats import mannwhitneyu  # noqa: PLC0415 - dear to import, and an extra of ours

    if len({*a, *b}) == 1:
        return 1.0
    if len({*a, *b}) < len(a) + len(b):
        return _p_of_ties(a, b)
    return min(1.0, float(mannwhitneyu(a, b, method="exact").pvalue))


def _p_of_ties(a: Sequence[float], b: Sequence[float]) -> float:
    """Twice the smaller tail of all permutations, which are counted: drawn ones would judge the same files otherwise.

    Counted by how many of the values are taken for ``a`` and by the sum of their ranks, doubled to be whole numbers.
    """
    values = [*a, *b]
    ranks = [2 * sum(each < value for each in values) + values.count(value) + 1 for value in values]
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in a)]
    for rank in ranks:
        for taken in range(len(a), 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] += count
    found = sum(ranks[: len(a)])
    below = sum(count for total, count in ways[-1].items() if total <= found)
    above = sum(count for total, count in ways[-1].items() if total >= found)
    return min(1.0, 2 * min(below, above) / math.comb(len(values), len(a)))


@functools.lru_cache
def least_p(a: int, b: int) -> float:
    """The least p that so many starts of A and of B can reach: all of one arm above all of the other."""
    return min(1.0, 2 / math.comb(a + b, a))


def starts_for(others: int) -> int:
    """The least starts an arm with which the primary measure, and each of so many others, can differ."""
    starts = 1
    while least_p(starts, starts) > (OTHERS_ALPHA / others if others else PRIMARY_ALPHA):
        starts += 1
    return starts


def legend(primary: Measure, others: int, starts: int) -> str:
    """What a table of verdicts must say beneath it.

    Args:
        primary: The measure that was named beforehand.
        others: How many other measures have a verdict.
        starts: How many starts each arm had.
    """
    said = (
        f"Verdict: exact Mann-Whitney over starts; {primary.name} was named beforehand (p at most {PRIMARY_ALPHA:g}), "
        f"the {others} others share {OTHERS_ALPHA:g} by Holm. The ratio is the median of those of all pairs of starts, "
        "in brackets those that the test does not reject."
    )
    enough = starts_for(0), starts_for(others)
    if starts >= enough[1]:
        return said
    return f"{said} With {starts} starts an arm: {enough[0]} would do for {primary.name}, {enough[1]} for all."


def _holm(p: Mapping[str, float]) -> dict[str, float]:
    """What each p must be at most: Holm's steps, all those after the first that fails standing at its step."""
    thresholds: dict[str, float] = {}
    step = OTHERS_ALPHA / max(1, len(p))
    failed = False
    for place, name in enumerate(sorted(p, key=lambda each: p[each])):
        if not failed:
            step = OTHERS_ALPHA / (len(p) - place)
            failed = p[name] > step
        thresholds[name] = step
    return thresholds


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of all B / A, which lies within the interval; NaN where a value of A is zero."""
    return math.nan if 0 in a else quantile((each / base for each in b for base in a), 0.5)


def _verdict(measure: Measure, a: Sequence[float], b: Sequence[float], p: float, threshold: float) -> Verdict:
    word: Word
    if least_p(len(a), len(b)) > threshold:
        word = "too few starts"
    elif p > threshold:
        word = "the same"
    else:
        higher = quantile(b, 0.5) > quantile(a, 0.5)
        word = "better" if higher == (measure.better == "higher") else "worse"
    return Verdict(word, ratio(a, b), interval(a, b, threshold), p, threshold)


def interval(a: Sequence[float], b: Sequence[float], threshold: float) -> tuple[float, float]:
    """All ratios r for which the test does not tell ``b`` from ``a`` times r; values are positive or zero.

    They end at two of the ratios of pairs, with as many of these beyond each end as U may have.
    """
    if min(*a, *b) <= 0 or least_p(len(a), len(b)) > threshold:
        return 0.0, math.inf
    ratios = sorted(each / base for each in b for base in a)
    beyond = _greatest_u(len(a), len(b), threshold)
    return ratios[beyond], ratios[-1 - beyond]


@functools.lru_cache
def _greatest_u(a: int, b: int, threshold: float) -> int:
    """The greatest U of so many starts at which two samples without ties differ at ``threshold``."""
    left = threshold * math.comb(a + b, a) / 2
    for u, count in enumerate(arrangements(a, b)):
        left -= count
        if left < 0:
            return u - 1
    raise AssertionError("all arrangements together are more than any share of them")


def arrangements(a: int, b: int) -> list[int]:
    """How many of all arrangements of two samples have U = 0, 1, ..., a * b: a Gaussian binomial coefficient."""
    counts = [1] + [0] * (a * b)
    for each in range(1, a + 1):
        for u in range(a * b, b + each - 1, -1):
            counts[u] -= counts[u - b - each]
        for u in range(each, a * b + 1):
            counts[u] += counts[u - each]
    return counts
