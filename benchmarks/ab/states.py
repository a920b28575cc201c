"""State files as typed objects, and what those of a server's processes must say of its arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from omni_fastpath import state
from omni_fastpath.declare import Process, State

SETTLE_S = 2.5
"""Seconds after which a state file has the last counters, a little more than ``state.REFRESH_S``."""

_FINE = (State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE)


class PatchRecord(BaseModel):
    """One patch in a state file."""

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    counters: dict[str, int] = {}
    figures: dict[str, list[dict[str, Any]]] = {}


class Snapshot(BaseModel):
    """A state file (``omni_fastpath.state.Publisher.said``)."""

    model_config = ConfigDict(extra="allow")

    pid: int
    started: int
    role: Process
    process_name: str
    stage: int | None = None
    replica: int | None = None
    omni_fastpath: str
    vllm: str | None
    vllm_omni: str | None
    source: str | None = None
    patches: dict[str, PatchRecord]


def of_processes(pids: Iterable[int]) -> list[Snapshot]:
    """The state files of these processes."""
    return [Snapshot.model_validate(each) for each in state.read_live() if each["pid"] in set(pids)]


def check(found: Sequence[Snapshot], enabled: frozenset[str], named: frozenset[str]) -> list[str]:
    """The differences of a server's state files from its arm, one line each.

    Args:
        found: The state files of its processes.
        enabled: The patches that the arm enables. All others must be off.
        named: Those of them that must serve in a process.
    """
    if not any(snapshot.role is Process.SERVER for snapshot in found):
        return [f"no state file of a server process in {state.folder()}"]
    problems = []
    served: set[str] = set()
    for snapshot in found:
        for name, record in snapshot.patches.items():
            is_wanted = name in enabled
            if record.state not in (_FINE if is_wanted else (State.OFF,)):
                place = f"{snapshot.process_name} ({snapshot.pid}): {name} is {record.state.value}"
                reason = f" ({record.reason})" if record.reason else ""
                problems.append(f"{place}{reason}, expected {'applied' if is_wanted else 'off'}")
            elif record.state.satisfies_requirement:
                served.add(name)
    if problems:
        return problems
    if enabled and not served:
        return [f"none of {', '.join(sorted(enabled))} serves in any process"]
    return [
        f"{name} serves in no process: "
        + "; ".join(dict.fromkeys(each.patches[name].reason for each in found if name in each.patches))
        for name in sorted(named - served)
    ]
