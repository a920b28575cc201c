"""The two arms, their servers, and the proof that each server was what its arm says."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import omni_simulated_device
from benchmarks.serving.server import Server, Shutdown
from omni_fastpath import overlay, statefile
from omni_fastpath.declare import State
from omni_fastpath.handoff import VARIABLE
from omni_fastpath.patches import PATCHES

STOCK, FASTPATH = "stock", "fastpath"

BASE = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni_2x.yaml"
"""The deploy YAML of both arms."""

ENGAGED: Mapping[str, str] = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
    "final_output_wakeup": "woken",
}
"""Patches that the fastpath arm must have applied, with the counter that must have moved."""

REPLICAS = 2
STAGES = 3
_OFF_REASON = "OMNI_FASTPATH=0"
_FASTER_STOP_S = 10.0


class WrongArmError(RuntimeError):
    """A server was not what its arm says; its figures must not be shown."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a server's state files said.

    Attributes:
        processes: Role to patch to state and reason.
        counters: Patch to counter to value, of the API server process.
    """

    processes: dict[str, dict[str, dict[str, str]]]
    counters: dict[str, dict[str, int]]


def environment(arm: str, device: str, temporary: Path) -> dict[str, str | None]:
    """What the arm's server gets on top of the harness's; nothing of ours from this shell gets through."""
    ours = [name for name in os.environ if name.startswith("OMNI_FASTPATH")]
    values: dict[str, str | None] = dict.fromkeys([*ours, VARIABLE, "VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS"])
    # Sockets go there, so that a server that is not asked to clean up leaves none in /tmp.
    values |= {
        "TMPDIR": str(temporary),
        "VLLM_RPC_BASE_PATH": str(temporary),
        omni_simulated_device.CONFIG_VARIABLE: device,
    }
    if arm == STOCK:
        values["OMNI_FASTPATH"] = "0"
    return values


def deploy_config(arm: str, base: Path, folder: Path) -> Path:
    """The arm's deploy YAML: the base itself, or the overlay that ``omni-fastpath overlay BASE`` writes."""
    if arm == STOCK:
        return base
    path = folder / "fastpath.yaml"
    overlay.write(overlay.build(base, [], PATCHES, output=path), path, force=True)
    return path


class DemoServer(Server):
    """A server that is killed instead of asked to stop, once everything is measured.

    A clean stop of six stage processes takes 22 to 28 seconds on two cores, a fifth of the demo. How servers stop is
    tested elsewhere; here the group is killed, and what it would have cleaned up is removed: shared memory by the
    harness, sockets with the server's own temporary folder.
    """

    def __init__(
        self, model: Path, deploy: Path, *, temporary: Path, log: Path, values: Mapping[str, str | None]
    ) -> None:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temporary = temporary
        super().__init__(model, deploy, environment=values, log_path=log, stop_timeout_s=_FASTER_STOP_S)

    def stop(self, *, keep_log: bool = False) -> Shutdown | None:
        """Kill the server's process group; then as the harness does."""
        if self._process is not None and self.shutdown is None:
            self.processes()  # remember whoever left the group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            return super().stop(keep_log=keep_log)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def api_environment(self) -> dict[str, str]:
        """The environment that the API server process really has."""
        assert self._process is not None
        return psutil.Process(self._process.pid).environ()


def prove(server: DemoServer, arm: str) -> Proof:
    """Read the server's state files and check that it is what the arm says.

    Raises:
        WrongArmError: It is not.
    """
    found = server.processes()
    expected = {f"stage{stage}_replica{replica}" for stage in range(STAGES) for replica in range(REPLICAS)} | {"api"}
    return check(arm, _states(server.runtime_folder / "omni-fastpath", found), expected, server.api_environment())


def _states(folder: Path, processes: Mapping[int, str]) -> dict[str, Any]:
    """Role to patches, from the files of live processes."""
    states = {}
    for path in sorted(folder.glob("*.json")):
        snapshot = statefile.Snapshot.model_validate_json(path.read_bytes())
        if snapshot.pid in processes and snapshot.process.alive:
            states[processes[snapshot.pid]] = snapshot.patches
    return states


def check(
    arm: str,
    states: Mapping[str, Mapping[str, statefile.PatchRecord]],
    expected: set[str],
    api_environment: Mapping[str, str],
) -> Proof:
    """Check the state of every process of a server.

    Args:
        arm: What the server should be.
        states: Role to patch to record, as its state files say.
        expected: The roles that must have a state file.
        api_environment: Of the API server process.

    Raises:
        WrongArmError: The server is not what the arm says; the message names each point.
    """
    wrong = [f"{role} has no state file" for role in sorted(expected - states.keys())]
    said = sorted(name for name in api_environment if name.startswith("OMNI_FASTPATH"))
    if arm == STOCK:
        if api_environment.get("OMNI_FASTPATH") != "0":
            wrong.append("the API server process has no OMNI_FASTPATH=0 in its environment")
    elif said:
        wrong.append(f"the API server process has {', '.join(said)} in its environment")
    for role, patches in sorted(states.items()):
        for name in ENGAGED:
            wrong += _wrong(arm, role, name, patches.get(name))
        if arm == STOCK:
            wrong += [
                f"{role}: {name} is {record.state.value}: {record.reason}"
                for name, record in patches.items()
                if name not in ENGAGED and record.state is not State.OFF
            ]
    if wrong:
        raise WrongArmError(f"this server is no {arm} arm:\n  " + "\n  ".join(wrong))
    processes = {
        role: {name: {"state": record.state.value, "reason": record.reason} for name, record in patches.items()}
        for role, patches in states.items()
    }
    return Proof(processes, {name: dict(record.counters) for name, record in states["api"].items() if record.counters})


def _wrong(arm: str, role: str, name: str, record: statefile.PatchRecord | None) -> list[str]:
    if record is None:
        return [f"{role}: {name} is not in the state file"]
    in_fastpath = State.APPLIED if role == "api" else State.NOT_APPLICABLE
    wanted = State.OFF if arm == STOCK else in_fastpath
    if record.state is not wanted:
        return [f"{role}: {name} is {record.state.value} ({record.reason}), wanted {wanted.value}"]
    if arm == STOCK and record.reason != _OFF_REASON:
        return [f"{role}: {name} is off because of {record.reason!r}, wanted {_OFF_REASON!r}"]
    return []


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
