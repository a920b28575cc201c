"""Two arms are told apart when they differ, and not when they do not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.verdict import Measure, interval, p_value, verdicts

TTFP = Measure("", "TTFP p50", "ms", "lower")
OTHERS = tuple(Measure("", f"other {number}", "ms", "lower") for number in range(8))

NOISE_SIGMA, DRIFT_SIGMA = 0.10, 0.055
"""Standard deviations of a figure's logarithm, the largest that were measured: from start to start of one arm, and of
the step from one start to the next of a walk."""


def test_the_starts_that_would_do_are_the_least_that_can_differ() -> None:
    """Four for the primary measure; six for up to nine others; one more than nine, and it is seven."""
    assert [verdict.starts_for(others) for others in (0, 9, 10)] == [4, 6, 7]


def test_a_verdict_is_shown_with_what_it_rests_on() -> None:
    """The ratios that are left, p, and what p had to be; with too few starts there is none of it."""
    low, high = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
    found = verdicts([TTFP], {TTFP.name: low}, {TTFP.name: high})[TTFP.name]
    assert found.interval is not None
    ends = "{:.2f} to {:.2f}".format(*found.interval)
    assert str(found) == f"worse ({ends}, p 0.002 of 0.030)"
    assert str(verdicts([TTFP], {TTFP.name: low[:3]}, {TTFP.name: high[:3]})[TTFP.name]) == "too few starts"
    said = verdict.legend(TTFP, 9, 2)
    assert said.endswith("Each arm has 2 starts. TTFP p50 needs 4, all measures need 6.")
    assert "would do" not in verdict.legend(TTFP, 9, 6)


def test_the_interval_holds_one_exactly_when_the_test_finds_nothing() -> None:
    """Interval and test are one: 1 is outside of the interval if and only if p is at most the threshold."""
    draws = random.Random(2)
    for _ in range(300):
        a = [draws.lognormvariate(0, 0.2) for _ in range(6)]
        b = [draws.lognormvariate(0.25, 0.2) for _ in range(6)]
        found = interval(a, b, verdict.PRIMARY_ALPHA)
        assert found is not None
        low, high = found
        assert (low <= 1 <= high) == (p_value(a, b) > verdict.PRIMARY_ALPHA)


def test_words_say_which_way_is_better() -> None:
    """B above A is worse where lower is better, and better where higher is."""
    low, high = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
    rate = Measure("", "throughput", "req/s", "higher")
    found = verdicts([TTFP, rate], {TTFP.name: low, rate.name: low}, {TTFP.name: high, rate.name: high})
    assert found[TTFP.name].word == "worse"
    assert found[rate.name].word == "better"
    assert found[TTFP.name].ratio == pytest.approx(1.8, rel=0.02)


def test_equal_values_are_the_same() -> None:
    """A count that is zero in every start differs nowhere, and has no ratio."""
    found = verdicts([TTFP], {TTFP.name: [0.0] * 6}, {TTFP.name: [0.0] * 6})[TTFP.name]
    assert (found.word, found.p) == ("no difference shown", 1.0)
    assert found.ratio is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_p_is_the_share_of_all_ways_to_deal(a: list[float], b: list[float]) -> None:
    """Each way counted by hand, ties and arms of one start too."""
    both = [*a, *b]

    def u(places: Sequence[int]) -> float:
        rest = [each for place, each in enumerate(both) if place not in places]
        return sum((both[place] > each) + (both[place] == each) / 2 for place in places for each in rest)

    seen, dealt = u(range(len(a))), [u(places) for places in itertools.combinations(range(len(both)), len(a))]
    tails = (sum(each <= seen for each in dealt), sum(each >= seen for each in dealt))
    assert p_value(a, b) == pytest.approx(min(1.0, 2 * min(tails) / len(dealt)))


def test_many_starts_with_ties_are_judged() -> None:
    """Of twenty an arm there are 138 thousand million ways to deal, which nobody can go through."""
    assert p_value([1.0] * 19 + [2.0], [2.0] * 19 + [1.0]) == pytest.approx(2 * (20 * 20 + 1) / math.comb(40, 20))


@pytest.mark.parametrize("b", [[], [math.nan]])
def test_a_start_without_a_figure_leaves_its_measure_without_a_verdict(b: list[float]) -> None:
    """An arm without a start, or a value that is no number; of the first measure it leaves none."""
    a, other = [1.0] * 6, OTHERS[0]
    assert verdicts([TTFP, other], {TTFP.name: a, other.name: a}, {TTFP.name: a, other.name: b}).keys() == {TTFP.name}
    assert verdicts([TTFP, other], {TTFP.name: a, other.name: a}, {TTFP.name: b, other.name: a}) == {}


def test_an_arm_against_itself_is_told_apart_in_at_most_a_twentieth_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 simulated runs of six starts an arm with drift, nine measures each, at most 5 % have any verdict."""
    draws, measures, order, runs, wrong = random.Random(3), (TTFP, *OTHERS), "ABBA" * 3, 2000, 0
    known: dict[int, float] = {}

    def p(a: list[float], b: list[float]) -> float:
        """The exact p, which follows from U: thousands of them take no time."""
        u = sum(x > y for x in a for y in b)
        return known[u] if u in known else known.setdefault(u, p_value(a, b))

    monkeypatch.setattr(verdict, "p_value", p)
    for _ in range(runs):
        drift = list(itertools.accumulate(draws.gauss(0, DRIFT_SIGMA) for _ in order))
        samples: dict[str, dict[str, list[float]]] = {arm: {each.name: [] for each in measures} for arm in "AB"}
        for measure, (arm, level) in itertools.product(measures, zip(order, drift, strict=True)):
            samples[arm][measure.name].append(math.exp(level + draws.gauss(0, NOISE_SIGMA)))
        words = {found.word for found in verdicts(measures, samples["A"], samples["B"]).values()}
        wrong += bool(words & {"better", "worse"})
    assert wrong <= 0.05 * runs, wrong
