"""A process that registers: its slots, its states, its engines; for tests that run in a process of their own."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
GATE = ("vllm_omni.engine.stage_runtime", "StageRuntime._build_logical_stage_init_plans")
HEADLESS_GATE = ("vllm_omni.engine.stage_engine_startup", "get_headless_replica_devices")
ALL_ON: dict[str, Any] = {
    "fastpath": {"nonblocking_dequeue": True, "budgeted_drain": True, "final_output_wakeup": True}
}


def yaml(folder: Path, name: str = "deploy.yaml", **content: Any) -> Path:
    """A deploy YAML (JSON is YAML) with one stage."""
    file = folder / name
    file.write_text(json.dumps({"stages": [{"stage_id": 0}], **content}), encoding="utf-8")
    return file


def holder(module: str, path: str) -> tuple[Any, str]:
    """The object that owns a slot, and the slot's name."""
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = vars(owner)[parent]
    return owner, name


def raw(module: str, path: str) -> Any:
    """A raw slot; None when it is absent."""
    owner, name = holder(module, path)
    return vars(owner).get(name)


def is_ours(value: Any) -> bool:
    """Whether a slot holds something of ours."""
    return type(value).__name__ == "FunctionWrapper" or getattr(value, "__module__", "").startswith("omni_fastpath")


def ours() -> set[str]:
    """Every slot of a patch, and the reader's, that holds something of ours."""
    from omni_fastpath.install import seams_here
    from omni_fastpath.patches import PATCHES

    keys = {READER}
    for patch in PATCHES:
        keys |= {(s.module, s.qualname) for s in seams_here(patch)}
    return {path for module, path in keys if is_ours(raw(module, path))}


DRAIN = {
    "OrchestratorBase._orchestration_loop",
    "OrchestratorBase._orchestration_loop_event_driven",
    "StagePool.add_client",
}
DEQUEUE = {"AsyncMPClient.get_output_nowait"}
WAKEUP = {"OmniEngineBase.try_get_output_async", "OmniEngineBase.get_output_blocking_async"}
EVERYTHING = DRAIN | DEQUEUE | WAKEUP


def states() -> dict[str, str]:
    """What the ledger of this process says."""
    from omni_fastpath.ledger import LEDGER

    return {entry.patch.name: entry.state.value for entry in LEDGER}


def asked(found: dict[str, str] | None = None) -> dict[str, str]:
    """Of the states, this process's or the given ones, those of patches that somebody asked for."""
    return {name: state for name, state in (states() if found is None else found).items() if state != "off"}


def default_set(kind: str) -> dict[str, str]:
    """The states of the default set in a process of that kind, on the installed release."""
    from omni_fastpath.install import state_here
    from omni_fastpath.patches import PATCHES

    found: dict[str, str] = {}
    for patch in PATCHES:
        if patch.default_on:
            state = state_here(patch).value
            found[patch.name] = state if kind in {each.value for each in patch.processes} else "not_applicable"
    return found


def state_files() -> list[dict[str, Any]]:
    """The state files of processes that live."""
    from omni_fastpath import statefile

    return statefile.read_live()


def register() -> None:
    """Register as vLLM's loader does."""
    from omni_fastpath import startup

    startup.register()


def read(file: Path) -> Any:
    """Read a deploy YAML as upstream does."""
    from vllm_omni.config import stage_config

    return stage_config.resolve_deploy_yaml(file)


def log() -> list[str]:
    """What our logger says from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.omni_fastpath").addHandler(handler)
    return messages


def engine(file: Path | None) -> Any:
    """Plan an engine's stages as upstream does before it spawns them: it reads the YAML again, and drops exceptions."""
    kind = importlib.import_module(GATE[0]).StageRuntime
    runtime = kind.__new__(kind)
    runtime._stage_configs, runtime._model, runtime._config_path = [], "model", str(file) if file else None
    return runtime._prepare_stage_plans()


class _NoDevices:
    runtime_config = None
    runtime: Any = None
    stage_id = 0


def headless() -> Any:
    """What a headless server calls before it spawns its stages."""
    return importlib.import_module(HEADLESS_GATE[0]).get_headless_replica_devices(_NoDevices(), 0, 1)


STAGE = "StageEngineCoreProc_stage0_replica0"
Seen = tuple[dict[str, str], list[dict[str, Any]], list[str]]
"""What a process sees: its states, its state files, and the packages of upstream's that it imported."""


def spawned(name: str = STAGE, below: str | None = None) -> Seen:
    """Spawn a process of this name, and say what it sees after registration; or what one of that name below it sees."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, below), name=name)
    process.start()
    sender.close()
    answer: Seen = receiver.recv()
    process.join()
    assert process.exitcode == 0
    return answer


def _report(to: Any, below: str | None) -> None:
    register()
    if below is not None:
        to.send(spawned(below))
        return
    upstream = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "vllm_omni"})
    to.send((states(), [file for file in state_files() if file["pid"] == os.getpid()], upstream))
