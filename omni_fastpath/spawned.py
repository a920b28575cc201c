"""Whether this process was spawned for a stage, by the names that vllm_omni and vllm give to such processes."""

from __future__ import annotations

import multiprocessing
import re

_ENGINE = re.compile(r"StageEngineCoreProc(_stage\d|$)|EngineCore(_DP\d+)?$")
_WORKER = re.compile(r"StageDiffusionProc$|VllmWorker-\d+$|DiffusionWorker-\d+$")


def is_engine() -> bool:
    """Whether this process runs a stage's scheduler."""
    return _is_spawned_as(_ENGINE)


def is_worker() -> bool:
    """Whether it is a worker of a stage, or a diffusion stage: there is no scheduler."""
    return _is_spawned_as(_WORKER)


def is_stage_process() -> bool:
    """Whether it runs a stage or a part of one."""
    return is_engine() or is_worker()


def _is_spawned_as(name: re.Pattern[str]) -> bool:
    return multiprocessing.parent_process() is not None and bool(name.match(multiprocessing.current_process().name))
