"""How the package comes into a process: registration arms, the deploy YAML decides, the parent hands on.

``register`` is the entry point of both plugin groups. It never raises for a reason of ours: an exception from a plugin
function would stop every vLLM process on the machine. A refusal is raised where a server can be refused: when it reads
its deploy YAML, before any stage is spawned.

Every vLLM process pays for this module, most for nothing: it imports only the standard library until something is
asked for.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_fastpath.config import Resolved
    from omni_fastpath.declare import Process
    from omni_fastpath.publish import Publisher

READER_MODULE = "vllm_omni.config.stage_config"
READER = "resolve_deploy_yaml"
"""The one slot that is touched when nothing is asked for. Every reader of a deploy YAML in 0.30 comes through it:
``load_deploy_config`` looks it up in its module when it is called, however it was imported itself."""

GATE_MODULE = "vllm_omni.engine.stage_runtime"
GATE_CLASS = "StageRuntime"
GATE = "_build_logical_stage_init_plans"
"""Written only when a server is being refused. A library user's ``Omni`` loads plugins after it has read its deploy
YAML; the reading that follows swallows exceptions, and this is what it calls next, before any stage is spawned."""

_ENGINE_PROCESS = re.compile(r"StageEngineCoreProc_stage\d|EngineCore(_DP\d+)?$")
_WORKER_PROCESS = re.compile(r"StageDiffusionProc$|VllmWorker-\d+$|DiffusionWorker-\d+$")
"""What vllm_omni and vllm call the processes that they spawn for a stage."""

logger = logging.getLogger("vllm.omni_fastpath")

_lock = threading.RLock()
_nesting = threading.local()
_registered = False
_listening = False
_publisher: Publisher | None = None
_refusal: Exception | None = None


def register() -> None:
    """Arm this process; may be called many times, does its work once, and never raises."""
    global _registered  # noqa: PLW0603 - one process, one registration
    with _lock:
        if _registered:
            return
        _registered = True
    try:
        _register()
    except Exception:
        logger.exception("omni-fastpath: registration failed; this process runs as stock")


def is_stage_process() -> bool:
    """Whether this process was spawned to run a stage or a part of one."""
    return _is_spawned_as(_ENGINE_PROCESS) or _is_spawned_as(_WORKER_PROCESS)


def _is_spawned_as(name: re.Pattern[str]) -> bool:
    return multiprocessing.parent_process() is not None and bool(name.match(multiprocessing.current_process().name))


def process_kind() -> Process:
    """What kind of process this is."""
    from omni_fastpath.declare import Process  # noqa: PLC0415

    if _is_spawned_as(_ENGINE_PROCESS):
        return Process.STAGE
    if _is_spawned_as(_WORKER_PROCESS):
        return Process.WORKER
    return Process.HEADLESS if "--headless" in sys.argv[1:] else Process.SERVER


def _register() -> None:
    said = any(name.startswith("OMNI_FASTPATH") for name in os.environ)
    if said and _register_master_off():
        return
    if is_stage_process():
        _register_stage()
        return
    _arm(READER_MODULE, _wrap_reader)
    if said:
        _arm_environment()


def _register_master_off() -> bool:
    """``OMNI_FASTPATH=0``: touch nothing; only say so where somebody may ask a server or a stage what it is."""
    from omni_fastpath import envs  # noqa: PLC0415

    if not envs.master_off(os.environ):
        return False
    if is_stage_process() or "--omni" in sys.argv[1:]:
        from omni_fastpath.declare import State  # noqa: PLC0415

        _set_all(State.OFF, "OMNI_FASTPATH=0")
        _publish("environment")
    return True


def _register_stage() -> None:
    """A spawned stage takes what its parent resolved, or nothing."""
    from omni_fastpath import handoff  # noqa: PLC0415

    if handoff.VARIABLE not in os.environ:
        return
    from omni_fastpath.install import apply  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    resolved = handoff.receive(PATCHES, os.environ)
    if resolved is None or not resolved.asked:
        return
    _listen()
    try:
        apply(resolved, process_kind())
    finally:
        _publish(resolved.source)


def _arm_environment() -> None:
    """What the environment switches on by itself is installed when its modules are there, without a YAML."""
    from omni_fastpath import config  # noqa: PLC0415
    from omni_fastpath.install import RefusedError, modules_of  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    try:
        resolved = config.resolve([], os.environ, PATCHES, partial=True)
    except config.ConfigError:
        return  # the server refuses when it reads its deploy YAML; a plain vLLM process is not our business
    if not resolved.asked:
        return
    # What other processes' patches patch may never be imported here; the stages are told when the deploy YAML is read.
    here = [patch for patch in PATCHES if patch.name in resolved.enabled and process_kind() in patch.processes]
    needed = frozenset[str]().union(*(modules_of(patch) for patch in here))
    imported: set[str] = set()

    def one_more(name: str, _module: Any) -> None:
        imported.add(name)
        if imported != needed or _publisher is not None:
            return  # some are missing, or a deploy YAML was read in the meantime
        try:
            _take_effect(resolved, "environment")
        except RefusedError as error:
            # An import is no place to refuse in; the reading of the deploy YAML is, and it resolves again.
            logger.error("%s", error)

    for name in needed:
        _arm(name, functools.partial(one_more, name))


def _arm(module: str, hook: Callable[[Any], None]) -> None:
    """Call ``hook`` when the module has been executed; now, if it has. The hook's errors stay ours."""
    from wrapt import register_post_import_hook  # noqa: PLC0415

    def guarded(imported: Any) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("omni-fastpath: preparing %s failed; this process may run as stock", module)

    register_post_import_hook(guarded, module)


# ---- The deploy YAML ----


def _wrap_reader(module: Any) -> None:
    from wrapt import FunctionWrapper  # noqa: PLC0415

    raw = vars(module).get(READER)
    if raw is None:
        from omni_fastpath.declare import State  # noqa: PLC0415

        _set_all(State.UNSUPPORTED, f"{READER_MODULE}:{READER} is gone: the deploy YAML cannot be read")
        _publish(None)
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
    _deploy_yaml_read(Path(args[0] if args else kwargs["path"]))
    return result


def _deploy_yaml_read(path: Path) -> None:
    global _refusal  # noqa: PLW0603 - one process, one verdict
    from omni_fastpath.config import ConfigError  # noqa: PLC0415
    from omni_fastpath.install import RefusedError  # noqa: PLC0415

    try:
        _resolve_and_take_effect(path)
        _refusal = None
    except (ConfigError, RefusedError) as error:
        _refusal = error
        _close_gate()
        raise
    except Exception:
        logger.exception("omni-fastpath: the fastpath block of %s could not take effect", path)


def _resolve_and_take_effect(path: Path) -> None:
    from omni_fastpath import config, handoff  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    resolved = config.resolve(config.read_blocks(path), os.environ, PATCHES)
    with _lock:
        if not resolved.asked and _publisher is None:
            # Nobody asked for anything, now or before: stay invisible, and let no stage of ours take up the result
            # of a server that happens to be our ancestor.
            os.environ.pop(handoff.VARIABLE, None)
            return
        _take_effect(resolved, str(path))


def _close_gate() -> None:
    """Make sure that the refusal is not lost where upstream swallows what its reader raises."""
    from omni_fastpath.seams import MARK, is_ours  # noqa: PLC0415

    owner = getattr(sys.modules.get(GATE_MODULE), GATE_CLASS, None)
    raw = vars(owner).get(GATE) if owner is not None else None
    if raw is None or is_ours(raw):
        return  # nothing is being started here, or the gate is closed already
    from wrapt import FunctionWrapper  # noqa: PLC0415

    def gate(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        if _refusal is not None:
            raise _refusal
        return wrapped(*args, **kwargs)

    ours = FunctionWrapper(raw, gate)
    setattr(ours, MARK, "refusal")
    setattr(owner, GATE, ours)


# ---- Taking effect ----


def _take_effect(resolved: Resolved, source: str) -> None:
    """Install in this process, hand the result to the stages that it will spawn, and make it visible."""
    from omni_fastpath import handoff  # noqa: PLC0415
    from omni_fastpath.install import apply  # noqa: PLC0415

    _listen()
    try:
        apply(resolved, process_kind())
        handoff.export(resolved)
    finally:
        _publish(source)


def _listen() -> None:
    """Let hook plugins hear of every change of a patch's state, the first included."""
    global _listening  # noqa: PLW0603 - once per process
    if _listening:
        return
    _listening = True
    try:
        from omni_fastpath.hooks import HOOKS  # noqa: PLC0415 - pluggy only where something is asked for
        from omni_fastpath.ledger import LEDGER  # noqa: PLC0415

        HOOKS.load()
        LEDGER.listen(HOOKS.on_patch_state)
    except Exception:
        logger.exception("omni-fastpath: hook plugins cannot be loaded; the patches work without them")


def _publish(source: str | None) -> None:
    """Start the state file, and where something was asked for the metrics, once; later calls note the new source."""
    global _publisher  # noqa: PLW0603 - one process, one state file
    from omni_fastpath.declare import Process  # noqa: PLC0415
    from omni_fastpath.publish import Publisher  # noqa: PLC0415

    with _lock:
        if _publisher is not None:
            _publisher.update(source)
            return
        kind = process_kind()
        _publisher = Publisher(kind, source)
        _publisher.start()
        if _listening and kind is Process.SERVER:  # a stage serves no metrics
            try:
                from omni_fastpath import metrics  # noqa: PLC0415 - only when something is on

                metrics.export(kind)
            except Exception:
                logger.exception("omni-fastpath: the metrics cannot be exported")


def _set_all(state: Any, reason: str) -> None:
    from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    for patch in PATCHES:
        LEDGER.set(patch, state, reason)
