"""Where figures go: a line on the way, a JSON line for each comparison."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path("results/save_queue.jsonl")


def progress(text: str) -> None:
    """Say what runs now."""
    print(f"  {text}", file=sys.stderr, flush=True)


def save(what: str, **values: Any) -> None:
    """Append a line to `RESULTS`."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **values}, default=dataclasses.asdict) + "\n")
