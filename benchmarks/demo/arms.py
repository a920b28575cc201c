"""The two arms, their servers, and the proof that each server was what its arm says."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

import omni_simulated_device
from benchmarks.rigs import server_arms as serving
from benchmarks.rigs.server import Server, Shutdown
from omni_fastpath import overlay
from omni_fastpath.compare.arm import Arm, WrongArmError
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import Snapshot

STOCK = Arm("stock")
FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"})
"""Its server is told the same by its deploy YAML, as a user would."""
ARMS = (STOCK, FASTPATH)

BASE = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni_2x.yaml"
"""The deploy YAML of both arms."""

ENGAGED: Mapping[str, str] = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
    "final_output_wakeup": "woken",
}
"""Patches of the API server process, with the counter that must have moved in the fastpath arm."""

REPLICAS = 2
STAGES = 3
_FASTER_STOP_S = 10.0


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


def prove(server: DemoServer, arm: Arm) -> Proof:
    """Read the server's state files and check that it is what the arm says, by the means that a user has.

    Raises:
        WrongArmError: It is not.
    """
    found = serving.prove(server, arm, serving.roles(STAGES, REPLICAS))
    check_means(arm, server.api_environment())
    return proof_of(found)


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
