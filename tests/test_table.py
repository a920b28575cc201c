"""The README's first table, as `make bench` measures it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.upstream


def test_every_row_has_its_measure() -> None:
    """Each name that ``--rows`` takes has a function that measures it."""
    from benchmarks.table import ROWS
    from benchmarks.table.rows import MEASURES

    assert list(MEASURES) == list(ROWS)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ((5.94, 12.67), "5.9 to 13 s"),
        ((0.0044, 0.033), "4.4 to 33 ms"),
        ((0.0301, 0.0299), "30 ms"),
        ((6.0,), "6 s"),
        ((0.033, 2.04), "33 ms to 2 s"),
    ],
)
def test_a_cell_says_the_least_and_the_most(seconds: tuple[float, ...], shown: str) -> None:
    """Of an arm's runs, in the unit that shows both, once where they are alike."""
    from benchmarks.table.rows import span

    assert span(seconds) == shown
