"""How the package comes into a process: registration arms, the deploy YAML decides, the parent hands on.

``register`` is the entry point of both plugin groups. It never raises for a reason of ours: an exception from a plugin
function would stop every vLLM process of the machine's user. A refusal is raised where a server can be refused: when
it reads its deploy YAML, before any stage is spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_fastpath import config, envs, handoff
from omni_fastpath.config import ConfigError, Resolved
from omni_fastpath.declare import Process, State
from omni_fastpath.install import RefusedError, apply, modules_of
from omni_fastpath.ledger import LEDGER, logger
from omni_fastpath.publish import Publisher, export_metrics

READER_MODULE = "vllm_omni.config.stage_config"
READER = "resolve_deploy_yaml"
"""The one slot that is touched when nothing is asked for. Every reader of a deploy YAML in 0.30 comes through it:
``load_deploy_config`` looks it up in its module when it is called, however it was imported itself."""

_STAGE_PROCESS_NAMES = ("StageEngineCoreProc", "StageDiffusionProc", "EngineCore", "VllmWorker", "Worker", "Diffusion")

_lock = threading.RLock()
_nesting = threading.local()
_registered = False
_publisher: Publisher | None = None


def register() -> None:
    """Arm this process; may be called many times, does its work once, and never raises."""
    global _registered  # noqa: PLW0603 - one process, one registration
    with _lock:
        if _registered:
            return
        _registered = True
    try:
        _register(process_kind())
    except Exception:
        logger.exception("omni-fastpath: registration failed; this process runs as stock")


def process_kind() -> Process:
    """What kind of process this is: upstream names the processes that it spawns."""
    name = multiprocessing.current_process().name
    if multiprocessing.parent_process() is not None and name.startswith(_STAGE_PROCESS_NAMES):
        return Process.STAGE
    return Process.HEADLESS if "--headless" in sys.argv[1:] else Process.SERVER


def _register(process: Process) -> None:
    if envs.master_off(os.environ):
        _declare_off("OMNI_FASTPATH=0")
        if process is Process.STAGE or "--omni" in sys.argv[1:]:
            _publish(process, "environment")
        return
    if process is Process.STAGE:
        _register_stage()
        return
    _arm(READER_MODULE, _wrap_reader)
    _arm_environment(process)


def _register_stage() -> None:
    """A spawned stage: what the parent resolved, or nothing."""
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415 - reading declarations is for those who need them

    resolved = handoff.receive(PATCHES, os.environ)
    if resolved is None or not resolved.asked:
        return
    try:
        apply(resolved, Process.STAGE)
    finally:
        _publish(Process.STAGE, resolved.source)


def _arm_environment(process: Process) -> None:
    """What the environment switches on by itself is installed when its modules are there, without a YAML."""
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    try:
        resolved = config.resolve([], os.environ, PATCHES)
    except ConfigError:
        return  # the server refuses when it reads its deploy YAML; a plain vLLM process is not our business
    if not resolved.asked:
        return
    needed = frozenset[str]().union(*(modules_of(patch) for patch in PATCHES if patch.name in resolved.enabled))

    def when_all_are_there(_module: Any) -> None:
        if _publisher is not None or not all(_is_imported(name) for name in needed):
            return  # a deploy YAML was read in the meantime, or some are still missing
        try:
            _take_effect(resolved, process, "environment")
        except RefusedError as error:
            # An import is no place to refuse in; the reading of the deploy YAML is, and it resolves again.
            logger.error("%s", error)

    for name in needed:
        _arm(name, when_all_are_there)


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _arm(module: str, hook: Callable[[Any], None]) -> None:
    """Call ``hook`` when the module has been imported; now, if it has. The hook's errors stay ours."""
    from wrapt import register_post_import_hook  # noqa: PLC0415

    def guarded(imported: Any) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("omni-fastpath: preparing %s failed; this process may run as stock", module)

    register_post_import_hook(guarded, module)


def _wrap_reader(module: Any) -> None:
    from wrapt import FunctionWrapper  # noqa: PLC0415

    raw = vars(module).get(READER)
    if raw is None:
        _declare_trouble(f"{READER_MODULE}:{READER} is gone: the deploy YAML cannot be read")
        return
    setattr(module, READER, FunctionWrapper(raw, _wrapped_resolve_deploy_yaml))


def _wrapped_resolve_deploy_yaml(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Read as upstream does, then let the file's ``fastpath:`` block and the environment take effect.

    Raises:
        ConfigError: The block or a variable is wrong. The server does not start.
        RefusedError: A patch that was asked for cannot serve, and the block says ``on_unsupported: fail``.
    """
    if getattr(_nesting, "reading", False):  # upstream recurses into base_config; the chain is ours to walk
        return wrapped(*args, **kwargs)
    _nesting.reading = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _nesting.reading = False
    path = args[0] if args else kwargs["path"]
    _deploy_yaml_read(Path(path))
    return result


def _deploy_yaml_read(path: Path) -> None:
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    resolved = config.resolve(config.read_blocks(path), os.environ, PATCHES)
    with _lock:
        if not resolved.asked and _publisher is None:
            return  # nobody asked for anything, now or before: stay invisible
        _take_effect(resolved, process_kind(), str(path))
        handoff.export(resolved)


def _take_effect(resolved: Resolved, process: Process, source: str) -> None:
    try:
        apply(resolved, process)
    finally:
        _publish(process, source)


def _publish(process: Process, source: str | None) -> None:
    """Start the state file and the metrics, once; later calls only note the new source."""
    global _publisher  # noqa: PLW0603 - one process, one state file
    with _lock:
        if _publisher is not None:
            _publisher.source = source
            _publisher.write()
            return
        _publisher = Publisher(process, source)
        _publisher.start()
        try:
            from omni_fastpath.hooks import HOOKS  # noqa: PLC0415 - pluggy only where something is on

            LEDGER.listen(HOOKS.on_patch_state)
            export_metrics()
        except Exception:
            logger.exception("omni-fastpath: the metrics cannot be exported")


def _declare_off(reason: str) -> None:
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    for patch in PATCHES:
        LEDGER.set(patch, State.OFF, reason)


def _declare_trouble(reason: str) -> None:
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    for patch in PATCHES:
        LEDGER.set(patch, State.UNSUPPORTED, reason)
    _publish(process_kind(), None)
