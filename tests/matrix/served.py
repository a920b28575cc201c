"""A real server on a release, stock and fastpath: what its state files say, and whether both answer alike."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import omni_simulated_device
from benchmarks.rigs import overlays, server_arms, user_arms, whole_server
from benchmarks.rigs.server import Server
from omni_fastpath.patches import PATCHES
from omni_fastpath.statefile import Snapshot
from omni_fastpath.tools.ab.answers import compare
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.capture import run_closed_loop
from tests.matrix.workplace import MatrixError, Workplace
from tests.questions import of_each_kind

STAGES, LIGHT = "1", "light"
"""Simulated devices: stage processes, or light engines in their place."""

SERVERS = ("0.22.0", "0.26.0", "0.30.0", "0.32.0rc1")
"""Releases that get a server.

0.24 and 0.28 are left out: each one's loop, front end and stages are those of a neighbour (0.26, 0.30).
"""

ARMS = (Arm("stock"), Arm("fastpath", {patch.env: "1" for patch in PATCHES}))
"""Fastpath is every patch, so that each one's state is seen where a server runs."""

DEVICE = '{"stages": {"*": {"base_ms": 3, "max_frames": 60}}}'
CONCURRENCY = 3

States = dict[str, dict[str, str]]
"""Of each patch what it is in each process, by role, with its reason."""


@dataclass(frozen=True)
class Served:
    """Both arms of a release's server.

    Attributes:
        states: What the fastpath arm's state files say.
        parity: `compare` of the answers.
        start_s: From start to ready, seconds, by arm.
        device: The simulated device that it ran on.
    """

    states: States
    parity: Mapping[str, Any]
    start_s: Mapping[str, float]
    device: str

    @property
    def has_stages(self) -> bool:
        """Whether there were stage processes, in which patches of the stages are."""
        return self.device != LIGHT


def run(place: Workplace, release: str, device: str) -> Served:
    """Start, ask and stop both arms.

    Raises:
        ServerError: One did not start.
        MatrixError: One is not the arm that it should be, was not answered, or did not end by itself.
    """
    answers, states, start_s = [], States(), dict[str, float]()
    for arm in ARMS:
        server = _server(place, release, arm, device)
        with server:
            captures = run_closed_loop(server.url, of_each_kind(), CONCURRENCY)
            time.sleep(user_arms.STATE_FILES_SETTLE_S if arm.on else 0)
            snapshots = server.snapshots()
        assert server.start_s is not None
        start_s[arm.name] = round(server.start_s, 1)
        bad = [capture.error for capture in captures if not capture.succeeded]
        if bad:
            raise MatrixError(f"{arm.name} on {release}: {len(bad)} requests failed, the first with {bad[0]}")
        if server.shutdown is None or server.shutdown.killed:
            raise MatrixError(f"{arm.name} on {release} did not end by itself: {server.shutdown}")
        _check_release(snapshots.values(), release, arm)
        answers.append((arm.name, [capture.answer() for capture in captures]))
        states = _states(snapshots)
    return Served(states, compare(answers), start_s, device)


def _server(place: Workplace, release: str, arm: Arm, device: str) -> Server:
    environment: dict[str, str | None] = {
        **server_arms.environment(arm),
        omni_simulated_device.CONFIG_VARIABLE: DEVICE,
        omni_simulated_device.ENABLE_VARIABLE: device,
        "PYTHONPATH": str(place.site),
    }
    return Server(
        whole_server.model_folder("qwen3_omni"),
        whole_server.deploy("qwen3_omni.yaml"),
        environment=environment,
        log_path=overlays.ROOT / "results" / "matrix-logs" / f"{release}-{arm.name}.log",
        release=release,
    )


def _check_release(snapshots: Iterable[Snapshot], release: str, arm: Arm) -> None:
    found = {snapshot.vllm_omni for snapshot in snapshots}
    if found != {release}:
        raise MatrixError(f"{arm.name} on {release}: the state files are of {sorted(map(str, found))}")


def _states(snapshots: Mapping[str, Snapshot]) -> States:
    states: States = {}
    for role, snapshot in snapshots.items():
        for name, record in snapshot.patches.items():
            states.setdefault(name, {})[role] = f"{record.state.value}: {record.reason}"
    return states
