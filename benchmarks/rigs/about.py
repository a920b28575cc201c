"""Where a figure of the benchmarks comes from: what ``omni-fastpath ab`` says of a start, and the commit that ran."""

from __future__ import annotations

import functools
import subprocess
import time
from pathlib import Path
from typing import Any

from omni_fastpath.tools.ab.files import about as of_a_start
from omni_fastpath.tools.ab.files import machine, versions


def about() -> dict[str, Any]:
    """This moment, machine, versions and commit, on every result line."""
    return {**of_a_start(), "commit": commit()}


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that runs, with a + where it was changed; None outside of one."""
    folder = Path(__file__).resolve().parents[2]
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def line() -> str:
    """All of it for the end of a table, in one line."""
    here = machine()
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    where = f"{here['processor']}, {here['cores']} cores, {here['memory_gib']} GiB"
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit() or 'none'}, {where}; {named}"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
