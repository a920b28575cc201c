"""There is one quantile."""

from __future__ import annotations

import math

from omni_fastpath.tools.ab.quantiles import quantile
from omni_fastpath.tools.ab.turns import turns


def test_a_quantile_is_linear_between_neighbours_and_nan_of_nothing() -> None:
    """What has no values has no figure."""
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.5
    assert math.isnan(quantile([], 0.5))


def test_turns_go_forwards_and_backwards() -> None:
    """Two arms run A B B A A B: drift hits both alike."""
    assert "".join(arm for _, arm in turns("AB", 3)) == "ABBAAB"
    assert [number for number, _ in turns("AB", 3)] == [0, 0, 1, 1, 2, 2]
