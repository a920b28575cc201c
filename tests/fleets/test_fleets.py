"""Random fleets, some; ``python -m tests.fleets stage --seeds 1000`` for many."""

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
