#!/usr/bin/env python
"""Writes the generated tables of ``docs/``, each between its marks.

    .venv/bin/python scripts/pages.py

Run it after a change of a patch's options or releases. A test compares the pages with these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from omni_fastpath import config
from omni_fastpath.declare import Patch, Row, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.process_role import MASTER, ON_UNLISTED, ON_UNSUPPORTED
from omni_fastpath.tools.tables import values

DOCS = Path(__file__).parents[1] / "docs"


def keys(patches: Sequence[Patch]) -> str:
    """Every key of the block and every variable, as Markdown."""
    every = "which patches are on; `true` is the default set"
    refuse = "`fail`: refuse to start if a patch that is on cannot serve"
    same = "`same_code`: treat an untested release like a tested one if every function is the same"
    lines = [
        "| key | default | allowed | what it does | variable |",
        "| --- | --- | --- | --- | --- |",
        f"| `{config.KEY}` | absent: off | true, false or a mapping | {every} | `{MASTER}` |",
        f"| `on_unsupported` | `warn` | `warn` or `fail` | {refuse} | `{ON_UNSUPPORTED}` |",
        f"| `on_unlisted` | by the release | `same_code` or `unsupported` | {same} | `{ON_UNLISTED}` |",
    ]
    for patch in patches:
        default = "in the default set" if patch.default_on else "opt-in"
        allowed = "true, false or a mapping" if patch.options.model_fields else "true or false"
        lines.append(f"| `{patch.name}` | {default} | {allowed} | {patch.summary} | `{patch.env}` |")
        for key, default, *told, variable in values(patch):
            lines.append(" | ".join([f"| `{patch.name}.{key}` | `{default}`", *told, f"`{variable}` |"]))
    return "\n".join(lines)


def matrix(patches: Sequence[Patch]) -> str:
    """The state of each patch on each listed release, as Markdown, with notes below the table."""
    previews = {release: row.preview for patch in patches for row in patch.rows for release in row.releases}
    releases = sorted(previews, key=Version)
    words: list[str] = []
    lines = [
        " | ".join(["| patch", *(f"{each} (preview)" if previews[each] else each for each in releases)]) + " |",
        " | ".join(["| ---", *("---" for _ in releases)]) + " |",
    ]
    for patch in patches:
        cells = [_cell(patch.listed(release), words) for release in releases]
        lines.append(" | ".join([f"| `{patch.name}`", *cells]) + " |")
    notes = [f"{number}. {each}" for number, each in enumerate(words, 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cell(listed: tuple[str, Row] | None, words: list[str]) -> str:
    """A state with the number of its note. A new note is added to ``words``."""
    if listed is None:
        return State.UNSUPPORTED.value
    _, row = listed
    if row.note and row.note not in words:
        words.append(row.note)
    mark = f"<sup>{words.index(row.note) + 1}</sup>" if row.note else ""
    return f"{row.state.value}{mark}".replace("_", " ")


def main() -> None:
    """Write both tables."""
    for page, mark, table in (
        ("configuration.md", "keys", keys(PATCHES)),
        ("operations.md", "matrix", matrix(PATCHES)),
    ):
        path = DOCS / page
        before, _, rest = path.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"\n<!-- /{mark} -->")[2]
        path.write_text(f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
