"""Where figures go: a JSON line for each comparison."""

from __future__ import annotations

from typing import Any

from benchmarks.rigs import results


def save(what: str, **values: Any) -> None:
    """Append a line to ``results/save_queue.jsonl``."""
    results.save("save_queue", {"what": what, **values})
