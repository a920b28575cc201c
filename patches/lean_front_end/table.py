"""The tables of a request's summary, with less work: a class in the place of PrettyTable, and a table not made yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_SIDES = {"l": "<", "r": ">"}


class LeanTable:
    """As much of a ``PrettyTable`` as upstream's ``_format_table`` uses, and the same text.

    Cells must be plain (ASCII that prints, so that a character is a column wide) and each column must be aligned to a
    side: then a table is one format string for all its rows. Whatever is not is handed on to a real ``PrettyTable``.

    Args:
        real: ``PrettyTable``.

    Attributes:
        field_names: Header, one string a column.
        align: ``l`` or ``r`` by header.
    """

    __slots__ = ("_real", "_rows", "align", "field_names")

    def __init__(self, real: Callable[[], Any]) -> None:
        self._real = real
        self._rows: list[list[str]] = []
        self.align: dict[str, str] = {}
        self.field_names: list[str] = []

    def add_row(self, row: list[str]) -> None:
        """One string a column."""
        self._rows.append(row)

    def get_string(self) -> str:
        """The table as PrettyTable prints it by default."""
        rows = [self.field_names, *self._rows]
        sides = [_SIDES.get(self.align.get(name, "")) for name in self.field_names]
        if not self._rows or None in sides or not _is_plain(rows):
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
        for name, side in self.align.items():
            table.align[name] = side
        for row in self._rows:
            table.add_row(row)
        text: str = table.get_string()
        return text


def _is_plain(rows: Iterable[list[str]]) -> bool:
    text = "".join("".join(row) for row in rows)
    return text.isascii() and text.isprintable()


class Table:
    """A table that is made when somebody reads it, of what its rows were when it was asked for.

    Args:
        make: Makes the text; takes what upstream's ``_format_table`` takes.
        title: Its first argument.
        data: Its second: one dict, or a list of dicts. Lists in them are copied: their owners may go on with them.
        rest: The others.
        named: Those given by name.
    """

    __slots__ = ("_data", "_make", "_named", "_rest", "_text", "_title")

    def __init__(self, make: Callable[..., str], title: str, data: Any, *rest: Any, **named: Any) -> None:
        self._make = make
        self._title = title
        self._data = _copied(data) if isinstance(data, dict) else [_copied(row) for row in data]
        self._rest = rest
        self._named = named
        self._text: str | None = None

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._make(self._title, self._data, *self._rest, **self._named)
        return self._text


def _copied(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value.copy() if isinstance(value, (list, dict)) else value for key, value in row.items()}
