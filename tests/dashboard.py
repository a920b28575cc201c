"""The dashboard as the tests read it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parents[1] / "benchmarks/dashboard/omni-fastpath.json"


def panels() -> list[dict[str, Any]]:
    """What asks something; rows do not."""
    every = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def queries() -> list[str]:
    """Of every panel, as they stand there."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def families_in(query: str) -> list[str]:
    """The metric families that a query asks for; of a histogram its own name."""
    names = re.findall(r"\b((?:vllm|vllm_omni):\w+|omni_fastpath_\w+)", query)
    return [re.sub(r"_(bucket|count|sum)$", "", name) for name in names]


def filled_in(query: str, window: str) -> str:
    """A query with everything chosen, over a window of time."""
    for name, value in (("$job", ".*"), ("$instance", ".*"), ("$model_name", ".*"), ("$__rate_interval", window)):
        query = query.replace(name, value)
    return query
