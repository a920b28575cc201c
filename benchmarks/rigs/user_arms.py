"""Stock and fastpath as a user has them, by environment and deploy YAML, and the proof that a server is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

import omni_simulated_device
from benchmarks.rigs import server_arms as serving
from benchmarks.rigs.server import Server
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import Snapshot
from omni_fastpath.tools import overlay
from omni_fastpath.tools.ab.arm import Arm, WrongArmError

STOCK = Arm("stock")
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
"""Its server is told the same by its deploy YAML, as a user would."""
ARMS = (STOCK, FASTPATH)

ENGAGED: Mapping[str, str] = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
    "final_output_wakeup": "woken",
}
"""Patches of the API server process, with the counter that must have moved in the fastpath arm."""

STATE_FILES_SETTLE_S = 2.5
"""After which a state file has the last counters: ``omni_fastpath.publish.REFRESH_S``, and a little."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a server's state files said.

    Attributes:
        processes: Role to patch to state and reason.
        counters: Patch to counter to value, of the API server process.
    """

    processes: dict[str, dict[str, dict[str, str]]]
    counters: dict[str, dict[str, int]]


def environment(arm: Arm, device: str, temporary: Path) -> dict[str, str | None]:
    """What the arm's server gets on top of the harness's; nothing of ours from this shell gets through."""
    # Sockets go to the folder, so that a server that is not asked to clean up leaves none in /tmp.
    return {
        **serving.environment(arm),
        **dict.fromkeys(arm.environment),
        "TMPDIR": str(temporary),
        "VLLM_RPC_BASE_PATH": str(temporary),
        omni_simulated_device.CONFIG_VARIABLE: device,
    }


def deploy_config(arm: Arm, base: Path, folder: Path) -> Path:
    """The arm's deploy YAML: the base itself, or the overlay that ``omni-fastpath overlay BASE`` writes."""
    if not arm.on:
        return base
    path = folder / "fastpath.yaml"
    path.write_text(overlay.build(base, [], PATCHES, output=path), encoding="utf-8")
    return path


def prove(server: Server, arm: Arm, roles: Iterable[str]) -> Proof:
    """Read the server's state files and check that it is what the arm says, by the means that a user has.

    Args:
        server: Ready to be asked.
        arm: What it should be.
        roles: The processes that must have a state file.

    Raises:
        WrongArmError: It is not.
    """
    found = serving.prove(server, arm, roles)
    check_means(arm, api_environment(server))
    return proof_of(found)


def api_environment(server: Server) -> dict[str, str]:
    """The environment that the API server process really has."""
    [pid] = [pid for pid, role in server.processes().items() if role == "api"]
    return psutil.Process(pid).environ()


def proof_of(snapshots: Mapping[str, Snapshot]) -> Proof:
    """What the report shows of a server's state files."""
    processes = {
        role: {name: {"state": each.state.value, "reason": each.reason} for name, each in found.patches.items()}
        for role, found in snapshots.items()
    }
    counters = {name: dict(each.counters) for name, each in snapshots["api"].patches.items() if each.counters}
    return Proof(processes, counters)


def check_means(arm: Arm, api_environment: Mapping[str, str]) -> None:
    """Check that stock is stock by ``OMNI_FASTPATH=0``, and fastpath by nothing but its deploy YAML.

    Raises:
        WrongArmError: The API server process has other variables of ours.
    """
    said = {name: value for name, value in api_environment.items() if name.startswith("OMNI_FASTPATH")}
    wanted = {} if arm.on else {"OMNI_FASTPATH": "0"}
    if said != wanted:
        raise WrongArmError(f"this server is no {arm.name} arm: its API server process has {said}, wanted {wanted}")


def check_engaged(before: Proof, after: Proof, requests: int) -> dict[str, dict[str, int]]:
    """How far the fastpath arm's counters moved during a load of so many requests.

    Raises:
        WrongArmError: A patch was applied but did not take effect at least once a request.
    """
    moved = {
        name: {event: count - before.counters.get(name, {}).get(event, 0) for event, count in events.items()}
        for name, events in after.counters.items()
    }
    idle = [
        f"{name}: {event} moved by {moved.get(name, {}).get(event, 0)} during {requests} requests"
        for name, event in ENGAGED.items()
        if moved.get(name, {}).get(event, 0) < requests
    ]
    if idle:
        raise WrongArmError("fastpath was applied but did not take effect:\n  " + "\n  ".join(idle))
    return moved
