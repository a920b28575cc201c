#!/usr/bin/env python
"""Writes the generated tables of ``docs/``, each between its marks.

    .venv/bin/python scripts/pages.py

Run it after a change of a patch's options or releases. A test compares the pages with these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from omni_fastpath.declare import Patch, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.tables import values

DOCS = Path(__file__).parents[1] / "docs"


def keys(patches: Sequence[Patch]) -> str:
    """Every key of the block that is not the name of a patch, as Markdown."""
    refuse = "`fail`: refuse to start if a patch is `unsupported` or `failed`. `warn`: start without it"
    same = "`same_code`: treat an untested release like a tested one if every function is the same"
    lines = [
        "| key | default | allowed | what it does |",
        "| --- | --- | --- | --- |",
        f"| `on_unsupported` | `warn` | `warn` or `fail` | {refuse} |",
        f"| `on_unlisted` | by the release | `same_code` or `unsupported` | {same} |",
    ]
    for patch in patches:
        for key, default, allowed, description, _ in values(patch):
            lines.append(f"| `{patch.name}.{key}` | `{default}` | {allowed} | {description} |")
    return "\n".join(lines)


def matrix(patches: Sequence[Patch]) -> str:
    """The listed releases and, as Markdown, each patch whose state on one of them needs a remark."""
    releases = sorted({release for patch in patches for release in patch.releases}, key=Version)
    names = ", ".join(f"{each} (preview)" if Version(each).is_prerelease else each for each in releases)
    lines = [
        f"Tested: {names}. A patch that is on is applied there, except:",
        "",
        "| patch | release | state | why |",
        "| --- | --- | --- | --- |",
    ]
    for patch in patches:
        for release in releases:
            listed = patch.listed(release)
            state, note = (listed[1].state, listed[1].note) if listed else (State.UNSUPPORTED, "")
            if note or state is not State.APPLIED:
                lines.append(f"| `{patch.name}` | {release} | {state.value.replace('_', ' ')} | {note} |")
    return "\n".join(lines)


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
