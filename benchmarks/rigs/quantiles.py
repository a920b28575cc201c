"""The one definition of a quantile that figures of ours have: numpy's default."""

from __future__ import annotations

import math
from collections.abc import Iterable


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linear between neighbours; NaN of nothing."""
    import numpy as np

    known = list(values)
    return float(np.quantile(known, share)) if known else math.nan
