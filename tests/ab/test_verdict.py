"""Two arms are told apart when they differ, and not when they do not."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ab import verdict
from benchmarks.ab.verdict import Measure, interval, p_value, verdicts

TTFP = Measure("TTFP p50", "lower")
LOW, HIGH = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]
OTHERS = tuple(Measure(f"other {number}", "lower") for number in range(8))


def test_a_verdict_is_shown_with_what_it_rests_on() -> None:
    """A verdict has interval, p and level, and too few starts have none of them."""
    found = verdicts([TTFP], {TTFP.name: LOW}, {TTFP.name: HIGH})[TTFP.name]
    assert found.interval is not None
    ends = "{:.2f} to {:.2f}".format(*found.interval)
    assert str(found) == f"worse ({ends}, p 0.002 of 0.030)"
    assert str(verdicts([TTFP], {TTFP.name: LOW[:3]}, {TTFP.name: HIGH[:3]})[TTFP.name]) == "too few starts"
    said = verdict.legend(TTFP, 9, 2)
    assert said.endswith("Each arm has 2 starts. TTFP p50 needs 4, all measures need 6.")
    assert "would do" not in verdict.legend(TTFP, 9, 6)


def test_the_interval_holds_one_exactly_when_the_test_finds_nothing() -> None:
    """The interval excludes 1 if and only if p is at most the level."""
    draws = random.Random(2)
    for _ in range(300):
        a = [draws.lognormvariate(0, 0.2) for _ in range(6)]
        b = [draws.lognormvariate(0.25, 0.2) for _ in range(6)]
        found = interval(a, b, verdict.PRIMARY_ALPHA)
        assert found is not None
        low, high = found
        assert (low <= 1 <= high) == (p_value(a, b) > verdict.PRIMARY_ALPHA)


@pytest.mark.parametrize(("clear", "word"), [(7, "worse"), (0, "no difference shown")])
def test_further_measures_share_a_level(clear: int, word: str) -> None:
    """By Holm's procedure, a p of 0.004 is enough for the last of eight measures, and not for the first."""
    a, b = [1.0, 2.0, 3.0, 4.0, 5.0, 7.0], [6.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    names, apart = [each.name for each in OTHERS], [21.0, 22.0, 23.0, 24.0, 25.0, 26.0]
    one = dict.fromkeys([TTFP.name, *names], a)
    other = {**one, **dict.fromkeys(names[:clear], apart), names[-1]: b}
    found = verdicts([TTFP, *OTHERS], one, other)[names[-1]]
    assert (round(found.p, 4), found.word) == (0.0043, word)


def test_words_say_which_way_is_better() -> None:
    """B above A is worse where lower is better, and better where higher is."""
    rate = Measure("throughput", "higher")
    found = verdicts([TTFP, rate], {TTFP.name: LOW, rate.name: LOW}, {TTFP.name: HIGH, rate.name: HIGH})
    assert found[TTFP.name].word == "worse"
    assert found[rate.name].word == "better"
    assert found[TTFP.name].ratio == pytest.approx(1.8, rel=0.02)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_p_is_the_share_of_all_ways_to_deal(a: list[float], b: list[float]) -> None:
    """The p-value equals an enumeration of all assignments, with ties and arms of one start."""
    both = [*a, *b]

    def u(places: Sequence[int]) -> float:
        rest = [each for place, each in enumerate(both) if place not in places]
        return sum((both[place] > each) + (both[place] == each) / 2 for place in places for each in rest)

    seen, dealt = u(range(len(a))), [u(places) for places in itertools.combinations(range(len(both)), len(a))]
    tails = (sum(each <= seen for each in dealt), sum(each >= seen for each in dealt))
    assert p_value(a, b) == pytest.approx(min(1.0, 2 * min(tails) / len(dealt)))


def test_many_starts_with_ties_are_judged() -> None:
    """The p-value is exact for twenty starts per arm, which cannot be enumerated."""
    assert p_value([1.0] * 19 + [2.0], [2.0] * 19 + [1.0]) == pytest.approx(2 * (20 * 20 + 1) / math.comb(40, 20))


@pytest.mark.parametrize("b", [[], [math.nan]])
def test_a_start_without_a_figure_leaves_its_measure_without_a_verdict(b: list[float]) -> None:
    """A measure with a missing value has no verdict, and if it is the primary one, no measure has."""
    a, other = [1.0] * 6, OTHERS[0]
    assert verdicts([TTFP, other], {TTFP.name: a, other.name: a}, {TTFP.name: a, other.name: b}).keys() == {TTFP.name}
    assert verdicts([TTFP, other], {TTFP.name: a, other.name: a}, {TTFP.name: b, other.name: a}) == {}
