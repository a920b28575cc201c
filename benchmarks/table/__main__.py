"""``python -m benchmarks.table``."""

from __future__ import annotations

import argparse
import dataclasses
import time

import benchmarks.table
from benchmarks.rigs import results
from benchmarks.table import ROWS
from omni_fastpath.compare import about


def main() -> None:
    """Measure the rows and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table",
        description=benchmarks.table.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="which; all")
    parser.add_argument("--full", action="store_true", help="longer, and more starts")
    options = parser.parse_args()
    about.commit()  # of the code that runs, whatever is committed meanwhile
    from benchmarks.table.rows import FULL, MEASURES, SHORT, Cells

    began = time.monotonic()
    found: dict[str, Cells] = {}
    for name in options.rows:
        results.progress(f"row {name!r}: {ROWS[name]}")
        found[name] = MEASURES[name](FULL if options.full else SHORT)
        results.save("table", {"row": name, "title": ROWS[name], **dataclasses.asdict(found[name])})
    print("| measured without a GPU | stock | fastpath |", "|---|---|---|", sep="\n")
    for name, cells in found.items():
        print(f"| {ROWS[name]} | {cells.stock} | {cells.fastpath} |")
    print()
    for name, cells in found.items():
        print(f"{ROWS[name]}; more of it: {cells.command}", *(f"  {each}" for each in cells.details), sep="\n")
    print(f"{about.line()}; {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
