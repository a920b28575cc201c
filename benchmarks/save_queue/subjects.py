"""The arms, each in a process of its own that has one stage and its receiver, and the check that each is what it says.

All arms of a comparison live at the same time and wait on their pipes, so that runs can alternate one by one: what
drifts on the machine hits all arms alike.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.rigs import arm as compare
from benchmarks.rigs import process_arms
from benchmarks.rigs.server import OFFLINE
from omni_fastpath.declare import Process

START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 600.0

ENVIRONMENT = {**OFFLINE, "OMNI_SIMULATED_DEVICE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

IMPORTED = (
    "vllm_omni",
    "vllm.utils.gc_utils",
    "vllm.v1.structured_output",
    "vllm_omni.core.sched.omni_ar_scheduler",
    "vllm_omni.distributed.omni_connectors.connectors.shm_connector",
    "vllm_omni.model_executor.stage_input_processors.qwen3_omni",
    "omni_simulated_device.worker",
    "benchmarks.save_queue.loads",
)
"""Upstream's and the benchmark's, imported once for all processes; nothing of ours."""

ON = {"OMNI_FASTPATH_SAVE_QUEUE_CAP": "1"}

FASTPATH = compare.Arm("fastpath", ON)
CAPPED = compare.Arm("fastpath, max_bytes 4 MiB", {**ON, "OMNI_FASTPATH_SAVE_QUEUE_CAP__MAX_BYTES": "4MiB"})


def check(arm: compare.Arm, rig: Any) -> None:
    """Assert that the stage is what the arm says."""
    process_arms.check(arm, Process.STAGE)
    queue = rig.adapter._pending_save_reqs
    assert (type(queue) is deque) is not arm.on, type(queue)


# ---- The process ----


@functools.cache
def forking() -> Any:
    """The context of all processes here: forked from one that has one thread and has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    before = dict(os.environ)
    try:
        _set_environment()
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _set_environment() -> None:
    for name in [name for name in os.environ if name.startswith((*compare.FOREIGN, "OMNI_SIMULATED_DEVICE"))]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)


class Subject:
    """An arm's process; a context manager.

    Args:
        arm: The arm.
        stage: Of `rig.STAGES`.
        config: The stage's file of `rig.stage_configs`.
        settings: Of `rig.Rig`.
    """

    def __init__(self, arm: compare.Arm, stage: int, config: Path, settings: Mapping[str, Any]) -> None:
        context = forking()
        self.arm, self.stage = arm, stage
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, arm, stage, config, settings), name=f"save-queue-{stage}"
        )
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the stage is there and has been checked."""
        self._answer(START_TIMEOUT_S)

    def call(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Run ``load`` or ``hang`` of `loads` in the process and return its result."""
        self._pipe.send((what, arguments))
        return self._answer(CALL_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{self.arm.name}, stage {self.stage}: no answer in {timeout_s:.0f} s")
        try:
            good, result = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.arm.name}, stage {self.stage}: the process ended") from None
        if not good:
            raise RuntimeError(f"{self.arm.name}, stage {self.stage}:\n{result}")
        answer: dict[str, Any] = result
        return answer

    def close(self) -> None:
        """End the process: it closes its stage when the pipe ends."""
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def subjects(arms: Sequence[compare.Arm], stage: int, config: Path, **settings: Any) -> Iterator[list[Subject]]:
    """All arms' processes, ready, with these settings of `rig.Rig`; ended on exit."""
    found: list[Subject] = []
    try:
        found.extend(Subject(arm, stage, config, settings) for arm in arms)
        for subject in found:
            subject.ready()
        yield found
    finally:
        for subject in found:
            subject.close()


def _serve(pipe: Any, arm: compare.Arm, stage: int, config: Path, settings: Mapping[str, Any]) -> None:
    _set_environment()
    # Upstream's imports and ends print a lot, the receiver's too; what matters comes through the pipe.
    with config.with_name(f"{os.getpid()}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        _serve_stage(pipe, arm, stage, config, settings)
    except (EOFError, BrokenPipeError):  # the driver is done, or gone
        return
    except Exception:  # the driver prints it
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))


def _serve_stage(pipe: Any, arm: compare.Arm, stage: int, config: Path, settings: Mapping[str, Any]) -> None:
    from vllm.utils.gc_utils import freeze_gc_heap

    from benchmarks.save_queue import loads
    from benchmarks.save_queue.receiver import Receiver
    from benchmarks.save_queue.rig import Rig

    commands: Mapping[str, Callable[..., dict[str, Any]]] = {"load": loads.run_load, "hang": loads.run_hang}
    with Receiver(stage, [pipe]) as receiver:
        process_arms.switch_on(arm, Process.STAGE)
        with Rig(config, **settings) as rig:
            check(arm, rig)
            receiver.wait_until_ready()
            freeze_gc_heap()  # as the engine core after its start
            pipe.send((True, {}))
            for run in range(1_000_000):
                what, arguments = pipe.recv()
                result = commands[what](rig, receiver, tag=f"save-queue-{os.getpid()}-{run}", **arguments)
                check(arm, rig)
                pipe.send((True, result))
