"""Where figures go: a word on the way, a result line that says where it comes from, a cell of a table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rigs.about import about

FOLDER = Path("results")


def progress(text: str) -> None:
    """Say what runs now."""
    print(f"  {text}", file=sys.stderr, flush=True)


def save(name: str, found: Mapping[str, Any]) -> None:
    """Append a line to ``results/NAME.jsonl``: figures, and the versions, commit and machine that they are from.

    A line that has been read and is written again keeps what it said of them.
    """
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.jsonl"
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps({"about": about(), **found}, default=dataclasses.asdict) + "\n")


def read(name: str) -> list[dict[str, Any]]:
    """The lines of ``results/NAME.jsonl`` so far, without one that was cut off."""
    path, found = FOLDER / f"{name}.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as it must be, its first column to the left; an empty row is a line across."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row) if row else table.add_section()
    Console(width=1000, soft_wrap=True).print(table)
