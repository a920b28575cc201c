"""The tables of a request's summary as PrettyTable prints them, with less work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SIDES = {"l": "<", "r": ">"}


class SummaryTable:
    """The part of ``PrettyTable`` that upstream's ``_format_table`` uses, with the same text.

    If all cells are printable ASCII, so that a character is one column wide, and each column is aligned to a side, a
    table is one format string for all its rows. A real ``PrettyTable`` makes any other table.

    Args:
        real: ``PrettyTable``.

    Attributes:
        field_names: Header, one string per column.
        align: ``l`` or ``r`` by header.
    """

    __slots__ = ("_real", "_rows", "align", "field_names")

    def __init__(self, real: Callable[[], Any]) -> None:
        self._real = real
        self._rows: list[list[str]] = []
        self.align: dict[str, str] = {}
        self.field_names: list[str] = []

    def add_row(self, row: list[str]) -> None:
        """Add a row, one string per column."""
        self._rows.append(row)

    def get_string(self) -> str:
        """The table as PrettyTable prints it by default."""
        rows = [self.field_names, *self._rows]
        sides = [_SIDES.get(self.align.get(name, "")) for name in self.field_names]
        text = "".join("".join(row) for row in rows)
        if not self._rows or None in sides or not (text.isascii() and text.isprintable()):
            return self._as_real()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rule = f"+{'+'.join('-' * (width + 2) for width in widths)}+"
        columns = (f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
        line = f"| {' | '.join(columns)} |".format
        header, *body = (line(*row) for row in rows)
        return "\n".join((rule, header, rule, *body, rule))

    def _as_real(self) -> str:
        table = self._real()
        table.field_names = self.field_names
        table.align.update(self.align)
        for row in self._rows:
            table.add_row(row)
        text: str = table.get_string()
        return text


class DebugTable(str):
    """The text of a table that is logged only at DEBUG. Empty if DEBUG is off."""

    __slots__ = ()
