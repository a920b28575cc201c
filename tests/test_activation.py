"""How a server's stages and the servers below it get what it resolved, with real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import ROOT, isolated
from tests.fakes.registration import (
    ALL_ON,
    asked,
    default_set,
    ours,
    read,
    register,
    state_files,
    states,
    yaml,
)

STAGE = "StageEngineCoreProc_stage0_replica0"


def _report(to: Any) -> None:
    """What a stage process sees after registration."""
    register()
    register()
    upstream = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "vllm_omni"})
    files = [file for file in state_files() if file["pid"] == os.getpid()]
    to.send((states(), files, upstream))


def _stage(name: str = STAGE) -> tuple[dict[str, str], list[dict[str, Any]], list[str]]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender,), name=name)
    process.start()
    sender.close()
    answer: tuple[dict[str, str], list[dict[str, Any]], list[str]] = receiver.recv()
    process.join()
    assert process.exitcode == 0
    return answer


@pytest.mark.upstream
@pytest.mark.parametrize(
    "name", [STAGE, "StageEngineCoreProc", "StageDiffusionProc", "EngineCore", "EngineCore_DP1", "VllmWorker-0"]
)
@isolated("warm")
def test_stage_gets_what_its_parent_resolved(tmp_path: Path, name: str) -> None:
    """A spawned stage reports the parent's patches as not applicable there, without importing upstream for it."""
    register()
    file = yaml(tmp_path, **ALL_ON)
    read(file)
    handed = json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])
    assert handed["pid"] == os.getpid()
    seen, files, imported = _stage(name)
    assert asked(seen) == dict.fromkeys(ALL_ON["fastpath"], "not_applicable")
    assert imported == []
    [shown] = files
    role = "worker" if name in ("StageDiffusionProc", "VllmWorker-0") else "stage"
    assert (shown["role"], shown["process_name"], shown["source"]) == (role, name, str(file))


@pytest.mark.upstream
@isolated("warm")
def test_stage_of_a_stock_server_is_stock(tmp_path: Path) -> None:
    """Without a block, and after one that is gone again, the stage has nothing to report and writes no file."""
    register()
    read(yaml(tmp_path))
    assert _stage() == ({}, [], [])
    read(yaml(tmp_path, "on.yaml", **ALL_ON))
    read(yaml(tmp_path, "off.yaml"))
    seen, files, _ = _stage()
    assert (set(seen.values()) <= {"off"}, files) == (True, [])


@pytest.mark.upstream
@isolated("warm")
def test_environment_alone_reaches_the_stages() -> None:
    """What the environment switched on in a parent that read no deploy YAML is handed to its stages too."""
    os.environ["OMNI_FASTPATH"] = "1"
    register()
    seen, [shown], _ = _stage()
    assert (asked(seen), shown["role"]) == (default_set("stage"), "stage")
    seen, [shown], imported = _stage("VllmWorker-0")
    assert (set(asked(seen).values()), shown["role"], imported) == ({"not_applicable"}, "worker", [])


@pytest.mark.upstream
@isolated("warm")
def test_stale_handoff_is_ignored(tmp_path: Path) -> None:
    """What another process left in the environment is nobody's configuration."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    handed = json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])
    for change in ({"started": handed["started"] - 1}, {"pid": 2**22 + 1}):
        os.environ["_OMNI_FASTPATH_HANDOFF"] = json.dumps({**handed, **change})
        assert _stage() == ({}, [], [])


@pytest.mark.upstream
@isolated("warm")
def test_handoff_of_an_ancestor_ends_at_a_server_of_its_own(tmp_path: Path) -> None:
    """A server that was started below another one and asks for nothing does not hand on what the other asked for."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    plain = yaml(tmp_path, "plain.yaml")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_server_below, args=(plain, sender))
    process.start()
    assert receiver.recv() == ({}, [], [])
    process.join()


@pytest.mark.upstream
@pytest.mark.parametrize("depth", [1, 2])
@isolated("warm")
def test_plain_server_below_an_omni_one_is_plain(tmp_path: Path, depth: int) -> None:
    """A plain ``vllm serve`` that a process with Omni starts takes nothing up, and its engines do not either."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    script = "from tests.test_activation import plain_server; plain_server()"
    command = [sys.executable, "-c", script]
    if depth == 2:  # by way of a shell, or a launcher
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r}, check=True)"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "({}, [], [])"


def plain_server() -> None:
    """``vllm serve`` without ``--omni``: registers as every vLLM process does, reads no deploy YAML, and spawns."""
    register()
    print(_stage("EngineCore"))  # noqa: T201


def _server_below(file: Path, to: Any) -> None:
    from omni_fastpath.activation import ACTIVATION
    from omni_fastpath.ledger import LEDGER

    # As in a fresh process: a fork has its parent's state.
    ACTIVATION._publisher = None
    LEDGER.clear()
    read(file)
    to.send(_stage())


@pytest.mark.upstream
@isolated("warm")
def test_master_off_reaches_the_stages(tmp_path: Path) -> None:
    """Under ``OMNI_FASTPATH=0`` a stage shows that everything is off."""
    os.environ["OMNI_FASTPATH"] = "0"
    register()
    read(yaml(tmp_path, **ALL_ON))
    seen, files, imported = _stage()
    assert set(seen.values()) == {"off"}
    assert len(files) == 1
    assert imported == []


@pytest.mark.upstream
@pytest.mark.parametrize("in_file", [False, True])
@isolated("cold")
def test_headless_server_is_told_by_its_arguments(tmp_path: Path, in_file: bool) -> None:
    """``--headless``, on the command line or in the file that ``--config`` names, makes another kind of process."""
    from omni_fastpath.activation import process_kind
    from omni_fastpath.declare import Process

    config = tmp_path / "config.yaml"
    config.write_text("headless: true\nport: 1234\n")
    sys.argv[1:] = ["serve", "model", "--omni", *(["--config", str(config)] if in_file else ["--headless"])]
    assert process_kind() is Process.HEADLESS


@pytest.mark.upstream
@isolated("warm", "serve", "model", "--omni", "--headless")
def test_headless_server_reports_that_its_slots_are_elsewhere(tmp_path: Path) -> None:
    """A headless server resolves its own deploy YAML, installs nothing there, and hands on to its stages."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "not_applicable")
    assert ours() == {"resolve_deploy_yaml"}
    assert asked(_stage()[0]) == asked()
