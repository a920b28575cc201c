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
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

PRIMARY_ALPHA = 0.03
"""Four starts an arm can reach p = 0.029, for one measure and no more."""

OTHERS_ALPHA = 0.02

STARTS = 6
"""Starts an arm unless told otherwise: p = 0.0022 can be reached, so that nine other measures have a chance."""

Better = Literal["higher", "lower"]
Word = Literal["better", "worse", "no difference shown", "too few starts"]


@dataclass(frozen=True)
class Measure:
    """What is compared: a row of a table.

    Attributes:
        group: The rows that it stands among; empty for none.
        name: Within the group.
        unit: Of its values; empty for a count.
        better: Which way is better.
        read: Its value of a start.
        digits: Behind the point, in the table.
        judged: It gets a verdict. Nine besides the primary one: of more, six starts an arm could not tell all.
        primary: It was named beforehand; one of a table.
    """

    group: str
    name: str
    unit: str
    better: Better
    read: Callable[[Any], float] = lambda _: math.nan
    digits: int = 0
    judged: bool = False
    primary: bool = False

    @property
    def title(self) -> str:
        """The name by itself."""
        return f"{self.name} ({self.group})" if self.group else self.name


@dataclass(frozen=True)
class Verdict:
    """What can be said of one measure.

    Attributes:
        word: ``better`` or ``worse`` (B against A), ``no difference shown`` (the interval says how large a one may have
            been missed), or ``too few starts``, with which none could have been found.
        ratio: As ``ratio`` says it.
        interval: The ratios that the test does not reject; None with too few starts, or where a value is zero.
        p: Two-sided and exact.
        threshold: What ``p`` had to be at most.
    """

    word: Word
    ratio: float | None
    interval: tuple[float, float] | None
    p: float
    threshold: float

    def __str__(self) -> str:
        """As tables show it: the word, and what it rests on."""
        if self.word == "too few starts":
            return self.word
        ratios = "{:.2f} to {:.2f}, ".format(*self.interval) if self.interval is not None else ""
        return f"{self.word} ({ratios}p {self.p:.3f} of {self.threshold:.3f})"


def verdicts(
    measures: Sequence[Measure], a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]
) -> dict[str, Verdict]:
    """The verdict of every measure by its title, B against A.

    A measure of which a start has no value gets none; where that is the first one, none does.

    Args:
        measures: Of different titles; the first is the primary one.
        a: Measure's title to a value for each start of A, NaN where it has none.
        b: The same of B.
    """
    known = [each for each in measures if _is_whole(a[each.title]) and _is_whole(b[each.title])]
    if not measures or measures[0] not in known:
        return {}
    p = {each.title: p_value(a[each.title], b[each.title]) for each in known}
    primary = measures[0].title
    thresholds = _holm({title: each for title, each in p.items() if title != primary}) | {primary: PRIMARY_ALPHA}
    return {
        each.title: _verdict(each, a[each.title], b[each.title], p[each.title], thresholds[each.title])
        for each in known
    }


def _is_whole(values: Sequence[float]) -> bool:
    return bool(values) and not any(map(math.isnan, values))


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Mann and Whitney's two-sided p, exact: of all ways to deal the ranks out, equal values sharing theirs.

    Scipy's goes through the permutations of ties one by one, never to end for twenty starts an arm, and takes no arm of
    one.
    """
    both, ranks = sorted((*a, *b)), Counter((*a, *b))
    twice = {value: 2 * both.index(value) + count + 1 for value, count in ranks.items()}  # the middle one of equal ones
    ways: list[Counter[int]] = [Counter([0]), *(Counter() for _ in a)]  # of each size: how often which sum
    for value in both:
        for smaller, larger in zip(ways[-2::-1], ways[:0:-1], strict=True):
            for total, many in smaller.items():
                larger[total + twice[value]] += many
    seen, dealt = sum(twice[value] for value in a), ways[-1]
    tails = (sum(many for total, many in dealt.items() if way * (total - seen) >= 0) for way in (-1, 1))
    return min(1.0, 2 * min(tails) / math.comb(len(both), len(a)))


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
        f"Verdict: exact Mann-Whitney over starts; {primary.title} was named beforehand (p at most {PRIMARY_ALPHA:g}), "
        f"the {others} others share {OTHERS_ALPHA:g} by Holm. The ratio is the median of those of all pairs of starts, "
        "in brackets those that the test does not reject."
    )
    enough = starts_for(0), starts_for(others)
    if starts >= enough[1]:
        return said
    return f"{said} With {starts} starts an arm: {enough[0]} would do for {primary.title}, {enough[1]} for all."


def _holm(p: Mapping[str, float]) -> dict[str, float]:
    """What each p must be at most: Holm's steps, all those after the first that fails standing at its step."""
    thresholds: dict[str, float] = {}
    step, failed = OTHERS_ALPHA, False
    for place, title in enumerate(sorted(p, key=lambda each: p[each])):
        if not failed:
            step = OTHERS_ALPHA / (len(p) - place)
            failed = p[title] > step
        thresholds[title] = step
    return thresholds


def ratio(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Median of all B / A, which lies within the interval; None where a start has no value, or one of A is zero."""
    if 0 in a or not (_is_whole(a) and _is_whole(b)):
        return None
    return statistics.median(each / base for each in b for base in a)


def _verdict(measure: Measure, a: Sequence[float], b: Sequence[float], p: float, threshold: float) -> Verdict:
    word: Word = "no difference shown"
    if least_p(len(a), len(b)) > threshold:
        word = "too few starts"
    elif p <= threshold:
        higher = statistics.median(b) > statistics.median(a)
        word = "better" if higher == (measure.better == "higher") else "worse"
    return Verdict(word, ratio(a, b), interval(a, b, threshold), p, threshold)


def interval(a: Sequence[float], b: Sequence[float], threshold: float) -> tuple[float, float] | None:
    """All ratios r for which the test does not tell ``b`` from ``a`` times r; values are positive or zero.

    They end at two of the ratios of pairs, with as many of these beyond each end as U may have.
    """
    if min(*a, *b) <= 0 or least_p(len(a), len(b)) > threshold:
        return None
    ratios = sorted(each / base for each in b for base in a)
    beyond = _greatest_u(len(a), len(b), threshold)
    return ratios[beyond], ratios[-1 - beyond]


@functools.cache
def _greatest_u(a: int, b: int, threshold: float) -> int:
    """The greatest U of so many starts at which two samples without ties differ at ``threshold``."""

    def with_u(u: int) -> list[int]:
        """Ranks of A that are U = u above the lowest: the highest of them are raised, by ``b`` each at most."""
        return [rank + min(b, max(0, u - b * (a - 1 - rank))) for rank in range(a)]

    def differs(u: int) -> bool:
        ranks = with_u(u)
        return p_value(ranks, [rank for rank in range(a + b) if rank not in ranks]) <= threshold

    return bisect_left(range(a * b), True, key=lambda u: not differs(u + 1))
