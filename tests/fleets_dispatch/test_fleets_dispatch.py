"""Random fleets through the orchestrator, on stock and on ours; ``python -m tests.fleets_dispatch`` runs a thousand."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.more) for first in range(10, 200, 10))])
def test_ours_says_what_stock_says(first: int) -> None:
    """Completed requests equal stock's, the others begin alike; nobody ends the orchestrator, and nothing is left."""
    from tests.fleets_dispatch.compare import verdicts

    wrong = [f"seed {each.seed}: {line}" for each in verdicts(range(first, first + 10)) for line in each.ours]
    assert not wrong, "\n".join([*wrong, "alone: python -m tests.fleets_dispatch --first SEED --seeds 1"])


def test_a_seed_is_played_the_same_twice() -> None:
    """A fleet, and what becomes of it, follow from its seed."""
    from tests.fleets_dispatch.compare import verdicts

    one, other = (next(verdicts([3])) for _ in range(2))
    assert [outcome.messages for outcome in one.outcomes] == [outcome.messages for outcome in other.outcomes]
    assert [outcome.log for outcome in one.outcomes] == [outcome.log for outcome in other.outcomes]
