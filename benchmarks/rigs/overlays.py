"""Other releases of vLLM and vLLM-Omni: folders with their packages, to be first on ``PYTHONPATH`` over ``.venv``.

``scripts/releases.txt`` says what a release needs, ``scripts/release.sh`` fetches it. The release that is installed
needs no folder.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from omni_fastpath.releases import installed_release

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "scripts" / "releases.txt"


def releases() -> tuple[str, ...]:
    """The releases of vllm-omni that can be had, oldest first."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return tuple(line.split()[0] for line in lines if line and not line.startswith("#"))


def folder(release: str) -> Path | None:
    """Where a release's packages are once they were fetched; None for the one that is installed."""
    if release == installed_release("vllm-omni"):
        return None
    return ROOT / ".cache" / "releases" / release


def fetch(release: str) -> None:
    """Put a release into its folder; quick when it is there.

    Raises:
        RuntimeError: It cannot be had.
    """
    if folder(release) is None:
        return
    done = subprocess.run(["bash", str(ROOT / "scripts" / "release.sh"), release], check=False)
    if done.returncode:
        raise RuntimeError(f"{release} could not be had: scripts/release.sh said why (status {done.returncode})")


def python_path(release: str, *more: Path | str) -> str:
    """The ``PYTHONPATH`` of a process on a release: its packages, then *more*."""
    found = folder(release)
    return os.pathsep.join(str(each) for each in (found, *more) if each is not None)
