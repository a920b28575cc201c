"""Random fleets of one stage; ``python -m tests.fleets.stage --seeds 1000`` for many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("seeds", [6, pytest.param(60, marks=pytest.mark.more)])
@pytest.mark.filterwarnings("ignore")  # upstream's, of sparse and complex tensors
def test_random_fleets_give_what_stock_gives(tmp_path_factory: pytest.TempPathFactory, seeds: int) -> None:
    """No engine step raises, and every stream that completes has the chunks, tokens and outputs that it has in stock.

    With adapters, coupled streams, sessions, aborts, preemption, slow, failing and hung sends, and exceptions of ours.
    """
    from benchmarks.save_queue.rig import stage_configs
    from tests.fleets.stage import runs

    configs: dict[int, Path] = stage_configs(tmp_path_factory.mktemp("fleets"))
    facts: Counter[str] = Counter()
    for faults, some in (("none", range(seeds // 2)), ("all", range(seeds // 2, seeds))):
        for verdict in runs(some, configs, faults=faults):
            assert not verdict.defects, verdict.words()
            facts += verdict.facts
    for happened in ("aborted", "completed"):
        assert facts[happened] > 0, (happened, facts)


def test_how_a_prompt_was_cut_is_no_difference_and_a_lost_piece_is() -> None:
    """Puts fail by their number; seed 145 gave other failed positions where other streams shared the batch."""
    from tests.fleets.stage import _of_positions
    from tests.fleets.stage_parts import Put

    def puts(cut: int, *lost: int) -> list[Put]:
        pieces = [range(at, min(at + cut, 100)) for at in range(0, 100, cut)]
        return [
            Put("", "", [float(value) for at in piece for value in (at, -at)], False, False, ok=number not in (2, 3))
            for number, piece in enumerate(pieces)
            if number not in lost
        ]

    assert not list(_of_positions("s", puts(24), puts(21), complete=True))
    assert list(_of_positions("s", puts(24), puts(21, 1), complete=True))
    assert list(_of_positions("s", puts(24), puts(21, 2), complete=True))
