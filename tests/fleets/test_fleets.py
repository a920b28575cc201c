"""Random fleets, some of each kind; ``python -m tests.fleets dispatch --seeds 1000`` and ``stage`` for many."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("seeds", [6, pytest.param(60, marks=pytest.mark.more)])
def test_every_stream_of_a_stage_is_stocks(tmp_path_factory: pytest.TempPathFactory, seeds: int) -> None:
    """No engine step raises, and every stream that completes has the chunks, tokens and outputs that it has in stock.

    With adapters, sessions, aborts, preemption, slow, failing and hung sends, and exceptions of ours.
    """
    from tests.fleets.stage import verdicts

    counts: Counter[str] = Counter()
    for verdict in verdicts(range(seeds), tmp_path_factory.mktemp("fleets")):
        assert not verdict.wrong, verdict
        counts += verdict.counts
    assert counts["aborted"] > 0, counts
    assert counts["completed"] > 0, counts


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.more) for first in range(10, 200, 10))])
def test_every_request_of_an_orchestrator_is_stocks(first: int) -> None:
    """Completed requests equal stock's, the others begin alike; nobody ends the orchestrator, and nothing is left."""
    from tests.fleets.dispatch import verdicts

    wrong = [f"seed {each.seed}: {line}" for each in verdicts(range(first, first + 10)) for line in each.wrong]
    assert not wrong, "\n".join([*wrong, "alone: python -m tests.fleets dispatch --seeds 1 --first SEED"])


def test_a_seed_of_an_orchestrator_is_played_the_same_twice() -> None:
    """A fleet, and what becomes of it, follow from its seed."""
    from tests.fleets.dispatch import verdicts

    one, other = (next(verdicts([3])) for _ in range(2))
    assert one.log == other.log
