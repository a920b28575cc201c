"""The Grafana dashboard: it is one, and asks for nothing that nobody exports."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from omni_fastpath.patches import PATCHES
from tests.dashboard import DASHBOARD, families_in, panels, queries

OWN = {
    *(metric.name for patch in PATCHES for metric in patch.metrics),
    "omni_fastpath_patch_state",
    "omni_fastpath_events_total",
    "omni_fastpath_greatest",
}
GAUGES = {metric.name for patch in PATCHES for metric in patch.metrics if metric.bounds is None}
VARIABLES = {"job", "instance", "model_name", "__rate_interval"}


def _dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def test_what_stands_there_does_not_overlap() -> None:
    """Each panel has an id and a place of its own on Grafana's 24 columns."""
    every = _dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for panel in every
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_every_panel_says_what_it_shows() -> None:
    """A title, a description and a unit; queries with letters and legends, from the data source that is chosen."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == chosen
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == [chr(ord("A") + place) for place in range(len(letters))]
        assert all(target["legendFormat"] and target["datasource"] == chosen for target in panel["targets"])


def test_variables_are_there_and_used() -> None:
    """Data source, job, instance and model are chosen above; a query uses no other, and each of ours two of them."""
    named = {variable["name"] for variable in _dashboard()["templating"]["list"]}
    assert named == {"datasource", *VARIABLES} - {"__rate_interval"}
    for query in queries():
        assert set(re.findall(r"\$\{?(\w+)", query)) <= VARIABLES
        assert 'job=~"$job", instance=~"$instance"' in query


@pytest.mark.parametrize("query", queries())
def test_two_servers_are_not_one(query: str) -> None:
    """What is of one replica or process, or a gauge of ours, is shown by server: all servers are chosen at first."""
    by = {label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(", ")}
    if by & {"replica", "process"} or set(families_in(query)) & GAUGES:
        assert "instance" in by


@pytest.mark.parametrize("query", queries())
def test_what_is_asked_of_us_is_exported(query: str) -> None:
    """Each name is one of ours, or upstream's."""
    for name in families_in(query):
        assert name in OWN or name.startswith(("vllm:", "vllm_omni:")), name


def test_every_figure_of_queue_metrics_has_a_panel() -> None:
    """None is exported for nobody."""
    asked = set(itertools.chain.from_iterable(map(families_in, queries())))
    assert {metric.name for patch in PATCHES for metric in patch.metrics} <= asked
