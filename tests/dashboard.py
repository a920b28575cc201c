"""The dashboard and the alert rules as the tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

import omni_fastpath

FOLDER = Path(omni_fastpath.__file__).parent / "tools/dashboard"
DASHBOARD, ALERTS = FOLDER / "omni-fastpath.json", FOLDER / "alerts.yaml"


def queries() -> list[str]:
    """The queries of all panels. Rows have none."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels if panel["type"] != "row" for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def families_in(query: str) -> list[str]:
    """The metric families in a query. A histogram counts by its own name."""
    names = re.findall(r"\b((?:vllm|vllm_omni):\w+|omni_fastpath_\w+)", query)
    return [re.sub(r"_(bucket|count|sum)$", "", name) for name in names]
