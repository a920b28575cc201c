"""The Grafana dashboard: it is one, and asks for nothing that nobody exports."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from omni_fastpath.patches import PATCHES
from tests.dashboard import DASHBOARD, families_in, queries

OWN = {
    *(metric.name for patch in PATCHES for metric in patch.metrics),
    "omni_fastpath_patch_state",
    "omni_fastpath_events_total",
    "omni_fastpath_greatest",
}
GAUGES = {metric.name for patch in PATCHES for metric in patch.metrics if metric.bounds is None}
VARIABLES = {"job", "instance", "model_name", "__rate_interval"}


def test_variables_are_there_and_used() -> None:
    """Data source, job, instance and model are chosen above; a query uses no other, and each of ours two of them."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    named = {variable["name"] for variable in dashboard["templating"]["list"]}
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
