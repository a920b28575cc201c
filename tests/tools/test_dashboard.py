"""The Grafana dashboard, the alert rules and what shows them: written out as they are, asking what is exported."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import omni_fastpath
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import cli

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


OWN = {
    *(metric.name for patch in PATCHES for metric in patch.metrics),
    "omni_fastpath_patch_state",
    "omni_fastpath_events_total",
    "omni_fastpath_greatest",
}
GAUGES = {metric.name for patch in PATCHES for metric in patch.metrics if metric.bounds is None}
VARIABLES = {"job", "instance", "model_name", "__rate_interval"}


def test_variables_are_there_and_used() -> None:
    """Queries use only the dashboard's variables, and what is of one replica or process is shown by server."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    named = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert named == {"datasource", *VARIABLES} - {"__rate_interval"}
    for query in queries():
        assert set(re.findall(r"\$\{?(\w+)", query)) <= VARIABLES
        assert 'job=~"$job", instance=~"$instance"' in query
        by = {label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(", ")}
        assert "instance" in by or not (by & {"replica", "process"} or set(families_in(query)) & GAUGES), query


@pytest.mark.parametrize("query", [*queries(), *(rule["expr"] for rule in alerts())])
def test_what_is_asked_of_us_is_exported(query: str) -> None:
    """Queries use only exported families of this package and of upstream, and declared counters."""
    for name in families_in(query):
        assert name in OWN or name.startswith(("vllm:", "vllm_omni:")), name
    counters = {(patch.name, counter.name) for patch in PATCHES for counter in patch.counters}
    assert {*re.findall(r'patch="(\w+)", event="(\w+)"', query)} <= counters


def test_every_figure_of_queue_metrics_has_a_panel() -> None:
    """Every metric of a patch is in a query."""
    asked = set(itertools.chain.from_iterable(map(families_in, queries())))
    assert {metric.name for patch in PATCHES for metric in patch.metrics} <= asked


def test_what_the_compose_file_shows_is_there() -> None:
    """Mounted files exist, embedded files are YAML, and only the server is a variable."""
    text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
    compose = yaml.safe_load(text)
    mounted = {volume.split(":")[0] for each in compose["services"].values() for volume in each["volumes"]}
    assert mounted == {f"./{DASHBOARD.name}", f"./{ALERTS.name}"}
    assert all(yaml.safe_load(each["content"]) for each in compose["configs"].values())
    assert re.findall(r"\$\W*(\w+)", text) == ["SERVER"]


def test_the_command_writes_them_and_overwrites_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are written again if they are unchanged, and changed ones are overwritten only with ``--force``."""
    folder = tmp_path / "made"
    command = ["dashboard", str(folder)]
    assert cli.main(command) == cli.main(command) == cli.FINE
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == {
        each.name: each.read_bytes() for each in FOLDER.iterdir()
    }
    (folder / ALERTS.name).write_text("mine")
    (folder / DASHBOARD.name).unlink()
    capsys.readouterr()
    assert cli.main(command) == cli.REFUSED
    assert f"{folder / ALERTS.name}: exists with other content" in capsys.readouterr().err
    assert (folder / ALERTS.name).read_text() == "mine"
    assert not (folder / DASHBOARD.name).exists()
    assert cli.main([*command, "--force"]) == cli.FINE
    assert (folder / ALERTS.name).read_bytes() == ALERTS.read_bytes()
