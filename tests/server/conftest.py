"""Real servers on the simulated device, shared by the tests of a process; one at a time in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import omni_simulated_device
from omni_fastpath.patches import PATCHES
from tests.fakes.registration import declared

DEPLOY = Path(omni_simulated_device.__file__).parent / "deploy"

LIMIT = 16
"""Requests at once that a server admits: more than most tests ask at a time."""

FAST_STEPS = {"stages": {"*": {"base_ms": 3, "alone_ms": 0, "saturating_ms": 0, "per_token_us": 0, "per_req_us": 0}}}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by name, made once."""
    from omni_simulated_device import models as makers

    made: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            getattr(makers, f"write_{name}")(made[name])
        return made[name]

    return model


@pytest.fixture(scope="session")
def server(models: Callable[[str], Path]) -> Callable[..., Any]:
    """Return a function that makes a server, which is a context manager."""
    from benchmarks.rigs.arm import has_no_use
    from benchmarks.rigs.server import Server

    def make(
        model: str, deploy: Path | str, *, environment: dict[str, str] | None = None, arguments: tuple[str, ...] = ()
    ) -> Server:
        path = deploy if isinstance(deploy, Path) else DEPLOY / deploy
        variables = {"OMNI_SIMULATED_DEVICE_CONFIG": json.dumps(FAST_STEPS), **(environment or {})}
        if not has_no_use(next(patch for patch in PATCHES if patch.name == "admission_limit")):
            arguments = (*arguments, f"--max-num-queued-reqs={LIMIT}")
        return Server(models(model), path, environment=variables, arguments=arguments)

    return make


def as_declared(*, every: bool = False) -> dict[str, str]:
    """The declared states of the patches in the API server's process, with the default set or every patch on."""
    return {**{patch.name: "off" for patch in PATCHES}, **declared("server", every=every)}


def states(server: Any, role: str = "server") -> dict[str, dict[str, Any]]:
    """The patches of the server's only process of that role, from its state file."""
    [found] = all_states(server, role)
    return found


def all_states(server: Any, role: str) -> list[dict[str, dict[str, Any]]]:
    """The patches of each of the server's processes of that role, from their state files."""
    found = [json.loads(path.read_text()) for path in (server.runtime_folder / "omni-fastpath").glob("*.json")]
    patches = [entry["patches"] for entry in found if entry["role"] == role]
    assert patches, f"no state file of a {role} process"
    return patches
