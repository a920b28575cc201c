"""A server as an arm: the environment that makes it one, and the proof that it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.ab import states
from benchmarks.ab.states import Snapshot
from benchmarks.rigs.arm import FOREIGN, Arm, WrongArmError, has_no_use
from benchmarks.rigs.server import Server
from omni_fastpath.declare import Process
from omni_fastpath.patches import PATCHES

GATE = "forward_gate"

ENGAGED: Mapping[str, str] = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
}
"""Patches of the API server process, with the counter that must move with each request."""

STATE_FILES_SETTLE_S = states.SETTLE_S

_PROVE_THERE = """
import json, sys, types, omni_fastpath, benchmarks.rigs.server_arms as there
arm, roles, found = json.load(sys.stdin)
found = {role: there.Snapshot.model_validate(each) for role, each in found.items()}
there.prove(types.SimpleNamespace(snapshots=lambda: found), there.Arm(*arm), roles)
print(omni_fastpath.__file__)
"""
"""Proves a server with the code of another checkout, by that code, and says where it is."""


def environment(arm: Arm) -> dict[str, str | None]:
    """What makes a server the arm, for `Server`: nothing of ours from this shell gets through (None removes it)."""
    values: dict[str, str | None] = dict.fromkeys(name for name in os.environ if name.startswith(FOREIGN))
    values["VLLM_OMNI_EVENT_DRIVEN_ORCH"] = None if arm.event_driven is None else str(int(arm.event_driven))
    return {**values, **arm.environment} | ({} if arm.on else {"OMNI_FASTPATH": "0"})


def roles(stages: int, replicas: int = 1) -> frozenset[str]:
    """The processes of a server that must have a state file, as `server.role` names them."""
    return frozenset({"api", *(f"stage{stage}_replica{each}" for stage in range(stages) for each in range(replicas))})


def prove(server: Server, arm: Arm, expected: Iterable[str]) -> dict[str, Snapshot]:
    """The state files of a server's processes, by role, after checking that it is the arm.

    Args:
        server: A server that is ready.
        arm: What it should be.
        expected: The roles that must have a state file.

    Raises:
        WrongArmError: It is not; the message names each difference.
    """
    found = server.snapshots()
    if "PYTHONPATH" in arm.environment:
        _prove_there(server, arm, expected, found)
        return found
    problems = [f"{role} has no state file" for role in sorted(set(expected) - found.keys())]
    # Each stage's patch serves in some pipelines only, and `admission_limit` only with --max-num-queued-reqs.
    sure = [each for each in PATCHES if Process.SERVER in each.processes and each.name != "admission_limit"]
    named = arm.enabled & {patch.name for patch in sure if not has_no_use(patch)}
    problems += states.check(list(found.values()), arm.enabled, named)
    if problems:
        raise WrongArmError(f"this server is no {arm.name} arm:\n  " + "\n  ".join(problems))
    return found


def _prove_there(server: Server, arm: Arm, expected: Iterable[str], found: Mapping[str, Snapshot]) -> None:
    """As `prove`, where the arm is another checkout's code: what the server's interpreter and variables import."""
    said = {role: each.model_dump(mode="json") for role, each in found.items()}
    own = {name: value for name, value in arm.environment.items() if name != "PYTHONPATH"}
    asked = json.dumps([(arm.name, own, arm.event_driven), [*expected], said])
    command = [sys.executable, "-P", "-c", _PROVE_THERE]
    done = subprocess.run(command, input=asked, env=server.environment(), capture_output=True, text=True, check=False)
    folder = Path(arm.environment["PYTHONPATH"], "omni_fastpath")
    if done.returncode or Path(done.stdout.strip()).parent != folder:
        raise WrongArmError(f"this server is no {arm.name} arm, by the code in {folder}:\n{done.stdout}{done.stderr}")


def check_gate(arm: Arm, processes: Mapping[str, Snapshot], *, has_talker: bool) -> None:
    """Check after a load that stages, light engines too, kept their payload back if the arm says so, and only then.

    Args:
        arm: What the server should be.
        processes: As `prove` returns them, with current counters.
        has_talker: Whether the model has a stage that sends its payload twice: Qwen3-Omni's talker.

    Raises:
        WrongArmError: They did not.
    """
    stages = [each.patches[GATE] for each in processes.values() if each.role is Process.STAGE]
    outputs = sum(each.counters.get("multimodal_outputs", 0) for each in stages)
    wanted = GATE in arm.enabled and has_talker
    if bool(outputs) != wanted:
        words = "some" if wanted else "none"
        raise WrongArmError(f"this server is no {arm.name} arm: {outputs} outputs were gated, wanted {words}")


def check_engaged(moved: Mapping[str, Mapping[str, int]], requests: int) -> None:
    """Check that the default set took effect during a load.

    Args:
        moved: How far the counters of the API server process moved, by patch and event.
        requests: Of the load.

    Raises:
        WrongArmError: A patch was applied but did not take effect at least once a request.
    """
    idle = [
        f"{name}: {event} moved by {moved.get(name, {}).get(event, 0)} during {requests} requests"
        for name, event in ENGAGED.items()
        if moved.get(name, {}).get(event, 0) < requests
    ]
    if idle:
        raise WrongArmError("fastpath was applied but did not take effect:\n  " + "\n  ".join(idle))
