"""A process that registers: its slots, its states, its engines; for tests that run in a process of their own."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_fastpath.startup import READER, START

Key = tuple[str, str]
"""A slot: its module, and its path in it."""

ON = dict.fromkeys(("nonblocking_dequeue", "budgeted_drain", "submission_errors"), "applied")
ALL_ON: dict[str, Any] = {"fastpath": dict.fromkeys(ON, True)}
NOTHING = {READER}
"""The slots in ``ours`` where no patch is installed."""


def yaml(folder: Path, name: str = "deploy.yaml", **content: Any) -> Path:
    """A deploy YAML (JSON is YAML) with one stage."""
    file = folder / name
    file.write_text(json.dumps({"stages": [{"stage_id": 0}], **content}), encoding="utf-8")
    return file


# ---- Slots ----


def holder(key: Key) -> tuple[Any, str]:
    """The object that owns a slot, and the slot's name; found without the code under test."""
    owner: Any = importlib.import_module(key[0])
    *parents, name = key[1].split(".")
    for parent in parents:
        owner = vars(owner)[parent]
    return owner, name


def raw(key: Key) -> Any:
    """A raw slot; None when it is absent."""
    owner, name = holder(key)
    return vars(owner).get(name)


def is_ours(value: Any) -> bool:
    """Whether a slot has an object of this package."""
    module = str(getattr(value, "__module__", ""))
    return type(value).__name__ == "FunctionWrapper" or module.startswith("omni_fastpath")


def ours() -> set[Key]:
    """Every slot of a patch, and the reader's, that has an object of this package."""
    from omni_fastpath.patches import PATCHES
    from tests.fakes.upstream import seams_here

    seams = [seam for patch in PATCHES for seam in seams_here(patch)]
    return {key for key in ({READER} | {(seam.module, seam.qualname) for seam in seams}) if is_ours(raw(key))}


def written(*names: str) -> set[Key]:
    """The slots that have an object of this package in a server when these patches are applied."""
    from omni_fastpath.declare import Add, Fit, Process, Replace, Wrap
    from omni_fastpath.install import row_here, seams_in
    from omni_fastpath.patches import PATCHES

    rows = [row_here(patch) for patch in PATCHES if patch.name in names]
    seams = [seam for row in rows if isinstance(row, Fit) for seam in seams_in(row, Process.SERVER)]
    return {(seam.module, seam.qualname) for seam in seams if isinstance(seam, (Wrap, Replace, Add))}


# ---- States ----


def states() -> dict[str, str]:
    """What the ledger of this process says."""
    from omni_fastpath.ledger import LEDGER

    return {entry.patch.name: entry.state.value for entry in LEDGER}


def asked(found: dict[str, str] | None = None) -> dict[str, str]:
    """Of the states, this process's or the given ones, those of patches that somebody asked for."""
    return {name: state for name, state in (states() if found is None else found).items() if state != "off"}


def declared(process: str, *, every: bool = False) -> dict[str, str]:
    """What the rows of the default set, or of every patch, say on the installed release in a process of that kind."""
    from omni_fastpath.declare import Process
    from omni_fastpath.install import state_here
    from omni_fastpath.patches import PATCHES

    return {
        patch.name: state_here(patch).value if Process(process) in patch.processes else "not_applicable"
        for patch in PATCHES
        if every or patch.default_on
    }


def state_files() -> list[dict[str, Any]]:
    """The state files of processes that live."""
    from omni_fastpath import state

    return state.read_live()


# ---- What a server does ----


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


def engine(file: Path | None, stages: Sequence[Any] = ()) -> Any:
    """Plan an engine's stages as upstream does before it spawns them: it reads the YAML again, and drops exceptions."""
    kind = importlib.import_module("vllm_omni.engine.stage_runtime").StageRuntime
    runtime = kind.__new__(kind)
    runtime._stage_configs, runtime._model, runtime._config_path = stages, "model", str(file) if file else None
    return runtime._prepare_stage_plans()


def headless(file: Path | None) -> Any:
    """What a headless server calls before it spawns its stages."""
    sys.argv.append("--headless")
    try:
        return getattr(importlib.import_module(START[0]), START[1])("model", file and str(file))
    finally:
        sys.argv.remove("--headless")


STAGE = "StageEngineCoreProc_stage0_replica0"
Seen = tuple[dict[str, str], list[dict[str, Any]], list[str]]
"""What a process sees: its states, its state files, and the upstream packages that it imported."""


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
