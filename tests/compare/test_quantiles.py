"""There is one quantile."""

from __future__ import annotations

import math
import random

import pytest

from omni_fastpath.tools.ab.quantiles import quantile
from omni_fastpath.tools.ab.turns import turns


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_numpys(share: float) -> None:
    """The definition is numpy's default."""
    import numpy as np

    draws = random.Random(1)
    for size in (1, 2, 3, 10, 101):
        values = [draws.random() for _ in range(size)]
        assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))


def test_a_quantile_of_nothing_is_nan_and_of_infinities_infinite() -> None:
    """What has no values has no figure; what never came took for ever."""
    assert math.isnan(quantile([], 0.5))
    assert quantile([math.inf, math.inf], 0.5) == math.inf


def test_turns_go_forwards_and_backwards() -> None:
    """Two arms run A B B A A B: drift hits both alike."""
    assert "".join(arm for _, arm in turns("AB", 3)) == "ABBAAB"
    assert [number for number, _ in turns("AB", 3)] == [0, 0, 1, 1, 2, 2]
