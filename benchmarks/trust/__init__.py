"""Long runs and faults on whole servers, and what both of them use."""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where upstream's connector keeps its chunks


def segments(word: str = "") -> list[str]:
    """What lies there with a word in its name."""
    return sorted(path.name for path in SHARED_MEMORY.iterdir() if word in path.name)


FLAT = {"alone_ms": 0, "saturating_ms": 0, "per_req_us": 0, "per_token_us": 0}
"""What the step of an H100 has besides its fixed part: none of it."""

_REPOSITORY = Path(__file__).resolve().parents[2]


def distribution(folder: Path, name: str, entry_points: str) -> str:
    """Write a distribution with these entry points into the folder; ``PYTHONPATH`` of a server that is to load it."""
    metadata = folder / f"{name}-0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    return os.pathsep.join([str(folder), str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
