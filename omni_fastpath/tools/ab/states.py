"""The patches that an arm enables, and the check that its server's state files agree."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_fastpath import statefile
from omni_fastpath.config import ConfigError, refusal, resolve_file
from omni_fastpath.declare import Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.process_role import NAMESPACE, master_off, value
from omni_fastpath.statefile import Snapshot
from omni_fastpath.tools import entrypoint
from omni_fastpath.tools.ab.serving import Child, MeasureError
from omni_fastpath.tools.overlay import find

SETTLE_S = 2.5
"""Seconds after which a state file has the last counters, a little more than ``statefile.REFRESH_S``."""

_FINE = (State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE)
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Expected:
    """The expected contents of the state files of an arm's server.

    Attributes:
        enabled: The enabled patches.
        named: The patches that are enabled by their own variables. Each must serve in a process.
        asked: Whether a server of this arm writes state files.
    """

    enabled: frozenset[str]
    named: frozenset[str]
    asked: bool


def expected(environ: Mapping[str, str], serve: Sequence[str]) -> Expected:
    """The expectation from the environment of an arm's server and the deploy YAML in its command.

    Raises:
        ConfigError: The server would refuse to start, or would not load the plugin.
    """
    deploy = value(serve, "--deploy-config")
    found = resolve_file(None if deploy is None else find(deploy), environ, PATCHES)
    if found.unknown:
        raise ConfigError("\n".join(found.unknown))
    allowed = environ.get(entrypoint.ALLOW_LIST)
    asked = master_off(environ) or bool(found.enabled)
    if asked and entrypoint.is_left_out(allowed):
        raise refusal(entrypoint.ALLOW_LIST, found=str(allowed), allowed=f"a list with {entrypoint.ENTRY_POINT}")
    return Expected(
        enabled=frozenset(found.enabled),
        named=frozenset(name for name in found.enabled if found.origins[name].startswith(f"{NAMESPACE}_")),
        asked=asked,
    )


def prove(server: Child, arm: str, wanted: Expected) -> list[Snapshot]:
    """The state files of a server's processes, after checking that they are as expected.

    Raises:
        MeasureError: They are still different some seconds after the server was ready.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        pids = server.tree().keys()
        found = [Snapshot.model_validate(each) for each in statefile.read_live() if each["pid"] in pids]
        problems = check(found, wanted)
        if not problems:
            return found
        if time.monotonic() > deadline:
            raise MeasureError(f"the server does not run the setting {arm}:\n  " + "\n  ".join(problems))
        server.interrupts.check()
        time.sleep(0.5)


def check(found: Sequence[Snapshot], wanted: Expected) -> list[str]:
    """The differences from the expectation, one line each."""
    if wanted.asked and not any(snapshot.role is Process.SERVER for snapshot in found):
        return [f"no state file of a server process in {statefile.folder()}"]
    problems = []
    served: set[str] = set()
    for snapshot in found:
        for name, record in snapshot.patches.items():
            is_wanted = name in wanted.enabled
            if record.state not in (_FINE if is_wanted else (State.OFF,)):
                place = f"{snapshot.process_name} ({snapshot.pid}): {name} is {record.state.value}"
                reason = f" ({record.reason})" if record.reason else ""
                problems.append(f"{place}{reason}, expected {'applied' if is_wanted else 'off'}")
            elif record.state.satisfies_requirement:
                served.add(name)
    if problems:
        return problems
    if wanted.enabled and not served:
        return [f"none of {', '.join(sorted(wanted.enabled))} serves in any process"]
    return [
        f"{name} serves in no process: "
        + "; ".join(dict.fromkeys(each.patches[name].reason for each in found if name in each.patches))
        for name in sorted(wanted.named - served)
    ]


def as_data(found: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """The data for a report: each process with the state, reason and counters of each patch."""
    shown = dict.fromkeys(("process_name", "role", "stage", "replica", "source"), True)
    patches = {"__all__": {"state", "reason", "counters"}}
    return [snapshot.model_dump(mode="json", include={**shown, "patches": patches}) for snapshot in found]
