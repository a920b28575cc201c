"""Whether two arms differ: an exact rank test over *starts*, and its interval of ratios.

A start (of a server or process) is one sample, however many requests it has, because its requests share the same
conditions. The test is Mann and Whitney's U, exact and two-sided. The interval contains every ratio B / A that this
test does not reject (Hodges and Lehmann, Annals of Mathematical Statistics 34, 1963), so verdict and interval agree.

One measure is chosen as primary in advance and is tested at ``PRIMARY_ALPHA``. The others share ``OTHERS_ALPHA`` by
Holm's procedure (Scandinavian Journal of Statistics 6, 1979). Together, at most 5 % of comparisons of an arm with
itself have a false verdict.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PRIMARY_ALPHA = 0.03
"""Four starts per arm can reach p = 0.029, which is enough for one measure."""

OTHERS_ALPHA = 0.02

STARTS = 6
"""The default number of starts per arm. It can reach p = 0.0022, which is enough for nine other measures."""

Better = Literal["higher", "lower"]
Word = Literal["better", "worse", "no difference shown", "too few starts"]


@dataclass(frozen=True)
class Measure:
    """A measure: a row of a table.

    Attributes:
        name: Its name.
        better: Which direction is better.
    """

    name: str
    better: Better


@dataclass(frozen=True)
class Verdict:
    """The verdict on one measure.

    Attributes:
        word: ``better`` or ``worse`` (B compared with A), ``no difference shown`` (the interval shows which differences
            are possible), or ``too few starts``, which could not show any difference.
        ratio: The result of ``ratio``.
        interval: The ratios that the test does not reject. None with too few starts, or if a value is zero.
        p: The p-value, two-sided and exact.
        threshold: The significance level.
    """

    word: Word
    ratio: float | None
    interval: tuple[float, float] | None
    p: float
    threshold: float

    def __str__(self) -> str:
        """The text in a table: the word, interval, p-value and level."""
        if self.word == "too few starts":
            return self.word
        ratios = "{:.2f} to {:.2f}, ".format(*self.interval) if self.interval is not None else ""
        return f"{self.word} ({ratios}p {self.p:.3f} of {self.threshold:.3f})"


def verdicts(
    measures: Sequence[Measure], a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]
) -> dict[str, Verdict]:
    """The verdict on every measure by its name, B compared with A.

    A measure without a value in a start has no verdict. If that is the first one, no measure has a verdict.

    Args:
        measures: The measures, with different names. The first is the primary one.
        a: For each name the values of A's starts, NaN if there is none.
        b: The same for B.
    """
    known = [each for each in measures if _is_whole(a[each.name]) and _is_whole(b[each.name])]
    if not measures or measures[0] not in known:
        return {}
    p = {each.name: p_value(a[each.name], b[each.name]) for each in known}
    primary = measures[0].name
    thresholds = _holm({title: each for title, each in p.items() if title != primary}) | {primary: PRIMARY_ALPHA}
    return {
        each.name: _verdict(each, a[each.name], b[each.name], p[each.name], thresholds[each.name]) for each in known
    }


def _is_whole(values: Sequence[float]) -> bool:
    return bool(values) and not any(map(math.isnan, values))


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Mann and Whitney's exact two-sided p, over all assignments of ranks. Equal values share a rank.

    Scipy enumerates permutations if there are ties, which takes too long for twenty starts per arm, and does not accept
    an arm with one start.
    """
    both, ranks = sorted((*a, *b)), Counter((*a, *b))
    twice = {value: 2 * both.index(value) + count + 1 for value, count in ranks.items()}  # the mean of equal ones
    seen, dealt = sum(twice[value] for value in a), _sums([twice[value] for value in both], len(a))
    tails = (sum(many for total, many in dealt.items() if way * (total - seen) >= 0) for way in (-1, 1))
    return min(1.0, 2 * min(tails) / math.comb(len(both), len(a)))


def _sums(ranks: Iterable[int], size: int) -> Counter[int]:
    """How often each sum occurs among the subsets of this size."""
    ways: list[Counter[int]] = [Counter([0]), *(Counter() for _ in range(size))]
    for rank in ranks:
        for smaller, larger in zip(ways[-2::-1], ways[:0:-1], strict=True):
            for total, many in smaller.items():
                larger[total + rank] += many
    return ways[-1]


def least_p(a: int, b: int) -> float:
    """The smallest p for these numbers of starts, if all values of one arm are above all of the other's."""
    return min(1.0, 2 / math.comb(a + b, a))


def starts_for(others: int) -> int:
    """The smallest number of starts per arm that can show a difference in the primary measure and in each other one."""
    starts = 1
    while least_p(starts, starts) > (OTHERS_ALPHA / others if others else PRIMARY_ALPHA):
        starts += 1
    return starts


def legend(primary: Measure, others: int, starts: int) -> str:
    """The legend of a table with verdicts.

    Args:
        primary: The primary measure.
        others: The number of other measures with a verdict.
        starts: The number of starts per arm.
    """
    text = (
        f"Verdict: exact Mann-Whitney test over starts. {primary.name} was chosen in advance (level "
        f"{PRIMARY_ALPHA:g}), and the {others} others share {OTHERS_ALPHA:g} by Holm. The ratio is the median over all "
        "pairs of starts. In brackets are the ratios that the test does not reject."
    )
    enough = starts_for(0), starts_for(others)
    if starts >= enough[1]:
        return text
    return f"{text} Each arm has {starts} starts. {primary.name} needs {enough[0]}, all measures need {enough[1]}."


def _holm(p: Mapping[str, float]) -> dict[str, float]:
    """The level of each p by Holm's procedure. Those after the first that fails keep its level."""
    thresholds: dict[str, float] = {}
    step, failed = OTHERS_ALPHA, False
    for place, title in enumerate(sorted(p, key=lambda each: p[each])):
        if not failed:
            step = OTHERS_ALPHA / (len(p) - place)
            failed = p[title] > step
        thresholds[title] = step
    return thresholds


def ratio(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The median of all B / A, which is within the interval. None if a value is missing, or one of A is zero."""
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
    """The ratios r for which the test does not distinguish ``b`` from ``a`` times r. Values are positive or zero.

    Its ends are ratios of pairs. The number of such ratios beyond each end is the greatest significant U.
    """
    if min(*a, *b) <= 0 or least_p(len(a), len(b)) > threshold:
        return None
    ratios = sorted(each / base for each in b for base in a)
    beyond = _greatest_u(len(a), len(b), threshold)
    return ratios[beyond], ratios[-1 - beyond]


@functools.cache
def _greatest_u(a: int, b: int, threshold: float) -> int:
    """The greatest U at which samples of these sizes without ties differ at ``threshold``. U 0 must differ."""
    dealt = _sums(range(a + b), a)  # every sum from that of the lowest ranks on, which is U 0
    tails = itertools.accumulate(dealt[total] for total in sorted(dealt))
    return sum(2 * tail / math.comb(a + b, a) <= threshold for tail in tails) - 1
