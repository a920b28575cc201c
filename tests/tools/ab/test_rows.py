"""A row says of its starts what its cells and its verdict say too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from omni_fastpath.tools.ab import rows
from omni_fastpath.tools.ab.rows import Row
from omni_fastpath.tools.ab.verdict import Measure

NONE = math.nan


@dataclass
class _Start:
    arm: str
    value: float


def _row(a: list[float], b: list[float], *, primary: bool = True) -> Row:
    starts = [_Start(arm, value) for arm, values in (("A", a), ("B", b)) for value in values]
    measure = Measure("", "TTFP", "ms", "lower", lambda start: start.value, primary=primary)
    return rows.rows([measure], starts, ("A", "B"))[0]


@pytest.mark.parametrize("primary", [True, False])
def test_one_cold_start_makes_no_ratio(primary: bool) -> None:
    """With equal medians the ratio is 1, with and without a verdict."""
    row = _row([400.0, *[100.0] * 5], [100.0] * 6, primary=primary)
    assert row.ratio == 1.0
    assert rows.by_arm(row)[1:4] == ["100 (100 to 400)", "100 (100 to 100)", "1.00"]
    assert row.verdict is None or (row.verdict.word, row.verdict.ratio) == ("no difference shown", row.ratio)


@pytest.mark.parametrize("values", [[NONE, 1.0, 3.0], [1.0, NONE, 3.0], [1.0, 3.0, NONE]])
def test_a_start_without_a_value_leaves_the_others_theirs(values: list[float]) -> None:
    """The cell has the other starts and their number, and the data are valid JSON."""
    row = _row([1.0, 2.0, 3.0], values)
    assert rows.by_arm(row)[2] == "2 (1 to 3), 2 of 3 starts"
    assert (row.ratio, row.verdict) == (None, None)
    json.dumps(rows.as_data([row]), allow_nan=False)
    assert rows.by_arm(_row([NONE, NONE], [NONE, 1.0]))[1:3] == ["-", "1, 1 of 2 starts"]
