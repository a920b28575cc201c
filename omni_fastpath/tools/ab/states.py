"""What an arm asks of omni-fastpath, and the proof from the state files of its server's processes that it was that."""

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
"""After which a state file has the last counters: ``omni_fastpath.statefile.REFRESH_S``, and a little."""

_SERVES = (State.APPLIED, State.SUPERSEDED)
_FINE = (*_SERVES, State.NOT_APPLICABLE)
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Expected:
    """What the state files of an arm's server must say.

    Attributes:
        enabled: The patches that are on.
        named: Those of them that a variable of their own switches on: each must serve somewhere.
        asked: Whether a server of this arm leaves state files at all.
    """

    enabled: frozenset[str]
    named: frozenset[str]
    asked: bool


def expected(environ: Mapping[str, str], serve: Sequence[str]) -> Expected:
    """What follows from the environment of an arm's server and from the deploy YAML that its command names.

    Raises:
        ConfigError: That server would refuse to start, or would not load us and leave no proof.
    """
    deploy = value(serve, "--deploy-config")
    found = resolve_file(None if deploy is None else find(deploy), environ, PATCHES)
    if found.unknown:
        raise ConfigError("\n".join(found.unknown))
    allowed = environ.get(entrypoint.ALLOW_LIST)
    asked = master_off(environ) or found.asked
    if asked and entrypoint.is_left_out(allowed):
        raise refusal(entrypoint.ALLOW_LIST, found=str(allowed), allowed=f"a list with {entrypoint.ENTRY_POINT}")
    return Expected(
        enabled=frozenset(found.enabled),
        named=frozenset(name for name in found.enabled if found.origins[name].startswith(f"{NAMESPACE}_")),
        asked=asked,
    )


def prove(server: Child, arm: str, wanted: Expected) -> list[Snapshot]:
    """The state files of a server's processes, which say that it is its arm.

    Raises:
        MeasureError: They do not, some seconds after it was ready either.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        pids = server.tree().keys()
        found = [Snapshot.model_validate(each) for each in statefile.read_live() if each["pid"] in pids]
        problems = check(found, wanted)
        if not problems:
            return found
        if time.monotonic() > deadline:
            raise MeasureError(f"this server is not what {arm} says:\n  " + "\n  ".join(problems))
        server.interrupts.check()
        time.sleep(0.5)


def check(found: Sequence[Snapshot], wanted: Expected) -> list[str]:
    """In what the state files are not as they must be, a line each."""
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
                problems.append(f"{place}{reason}, wanted {'applied' if is_wanted else 'off'}")
            elif record.state in _SERVES:
                served.add(name)
    if problems:
        return problems
    if wanted.enabled and not served:
        return [f"none of {', '.join(sorted(wanted.enabled))} serves in any of its processes"]
    return [
        f"{name} serves in none of its processes: "
        + "; ".join(dict.fromkeys(each.patches[name].reason for each in found if name in each.patches))
        for name in sorted(wanted.named - served)
    ]


def as_data(found: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """What a report shows of them: each process with state, reason and counters of each patch."""
    shown = dict.fromkeys(("process_name", "role", "stage", "replica", "source"), True)
    patches = {"__all__": {"state", "reason", "counters"}}
    return [snapshot.model_dump(mode="json", include={**shown, "patches": patches}) for snapshot in found]
