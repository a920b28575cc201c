"""Stock and fastpath as a user has them, by environment and deploy YAML, and the proof that a server is one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from benchmarks.rigs import server_arms, whole_server
from benchmarks.rigs.arm import Arm, WrongArmError
from benchmarks.rigs.arms import FASTPATH, STOCK
from benchmarks.rigs.server import Server
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import overlay

ARMS = (STOCK, FASTPATH)
"""What fastpath's environment says, its server is told by its deploy YAML, as a user would."""

ENGAGED: Mapping[str, str] = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
    "final_output_wakeup": "woken",
    "requests_first": "requests",
}
"""Patches of the API server process, with the counter that must have moved in the fastpath arm."""

Counters = Mapping[str, Mapping[str, int]]
"""Of the API server process, by patch and event."""


def server_of(
    arm: Arm, deploy: str, stages: Mapping[str, Mapping[str, float]], work: Path, log: Path, *, light: bool = False
) -> Server:
    """The arm's server, not started yet; nothing of ours from this shell gets through.

    Args:
        arm: What it should be.
        deploy: Which of the simulated device's deploy YAMLs.
        stages: As `whole_server.environment` has them.
        work: The start's folder, of `side_by_side.work_folder`.
        log: Where its log goes.
        light: Light engines instead of stage processes.
    """
    temporary = work / "tmp"
    temporary.mkdir(mode=0o700, exist_ok=True)
    # Sockets go to the folder, so that a server that is not asked to clean up leaves none in /tmp.
    environment = {
        **whole_server.environment(arm, stages, light=light),
        **dict.fromkeys(arm.environment),
        "TMPDIR": str(temporary),
        "VLLM_RPC_BASE_PATH": str(temporary),
    }
    config = deploy_config(arm, whole_server.deploy(deploy), work)
    return Server(whole_server.model_folder("qwen3_omni"), config, environment=environment, log_path=log)


def deploy_config(arm: Arm, base: Path, folder: Path) -> Path:
    """The arm's deploy YAML: the base itself, or the overlay that ``omni-fastpath overlay BASE`` writes."""
    if not arm.on:
        return base
    path = folder / "fastpath.yaml"
    path.write_text(overlay.build(base, [], PATCHES, output=path), encoding="utf-8")
    return path


def prove(server: Server, arm: Arm, roles: Iterable[str]) -> Counters:
    """The counters of a server's API process, after a check that it is what the arm says, by a user's means.

    Args:
        server: Ready to be asked.
        arm: What it should be.
        roles: The processes that must have a state file.

    Raises:
        WrongArmError: It is not.
    """
    found = server_arms.prove(server, arm, roles)
    [pid] = [pid for pid, role in server.processes().items() if role == "api"]
    check_means(arm, psutil.Process(pid).environ())
    return {name: dict(each.counters) for name, each in found["api"].patches.items() if each.counters}


def prove_after(
    server: Server, arm: Arm, roles: Iterable[str], before: Counters, requests: int
) -> dict[str, dict[str, int]]:
    """How far fastpath's counters moved during so many requests, after the same check; none of stock's do.

    Raises:
        WrongArmError: The server is not what the arm says, or a patch did not take effect at least once a request.
    """
    time.sleep(server_arms.STATE_FILES_SETTLE_S)
    after = prove(server, arm, roles)
    server_arms.check_gate(arm, server.snapshots(), has_talker=True)
    return check_engaged(before, after, requests) if arm.on else {}


def check_means(arm: Arm, api_environment: Mapping[str, str]) -> None:
    """Check that stock is stock by ``OMNI_FASTPATH=0``, and fastpath by nothing but its deploy YAML.

    Raises:
        WrongArmError: The API server process has other variables of ours.
    """
    said = {name: value for name, value in api_environment.items() if name.startswith("OMNI_FASTPATH")}
    wanted = {} if arm.on else {"OMNI_FASTPATH": "0"}
    if said != wanted:
        raise WrongArmError(f"this server is no {arm.name} arm: its API server process has {said}, wanted {wanted}")


def check_engaged(before: Counters, after: Counters, requests: int) -> dict[str, dict[str, int]]:
    """How far the fastpath arm's counters moved during a load of so many requests.

    Raises:
        WrongArmError: A patch was applied but did not take effect at least once a request.
    """
    moved = {
        name: {event: count - before.get(name, {}).get(event, 0) for event, count in events.items()}
        for name, events in after.items()
    }
    idle = [
        f"{name}: {event} moved by {moved.get(name, {}).get(event, 0)} during {requests} requests"
        for name, event in ENGAGED.items()
        if moved.get(name, {}).get(event, 0) < requests
    ]
    if idle:
        raise WrongArmError("fastpath was applied but did not take effect:\n  " + "\n  ".join(idle))
    return moved
