"""How the package comes into a process: registration arms, the deploy YAML decides, the parent hands on.

``register`` is the entry point of both plugin groups. It never raises for a reason of ours: an exception from a plugin
function would stop every vLLM process on the machine. A refusal is raised where a server can be refused: when it reads
its deploy YAML, and where it has none, or what reads it swallows exceptions, at the gate before its stages are spawned.

Three things can go wrong, and each has its answer. What somebody set is bad: refused, always. A patch cannot serve:
``on_unsupported`` decides. We ourselves fail: the same, with the patches ``failed``; never a stock server in silence,
and never a refusal where nobody asked for anything.

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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from omni_fastpath import HANDOFF

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
"""Written when somebody asks for something: what an engine calls before it spawns its stages, right after it has read
its deploy YAML once more, with exceptions swallowed. A library user's ``Omni`` loads plugins only after its first
reading, and an engine without a deploy YAML reads nothing."""

HEADLESS_GATE_MODULE = "vllm_omni.engine.stage_engine_startup"
HEADLESS_GATE = "get_headless_replica_devices"
"""The same for a headless server, which has no stage runtime and looks this function up when it calls it."""

_ENGINE_PROCESS = re.compile(r"StageEngineCoreProc_stage\d|EngineCore(_DP\d+)?$")
_WORKER_PROCESS = re.compile(r"StageDiffusionProc$|VllmWorker-\d+$|DiffusionWorker-\d+$")
"""What vllm_omni and vllm call the processes that they spawn for a stage."""

logger = logging.getLogger("vllm.omni_fastpath")

_lock = threading.RLock()
_nesting = threading.local()
_registered = False
_listening = False
_publisher: Publisher | None = None
_deploy_yaml: str | None = None
"""The deploy YAML that took effect last; None before the first."""
_enabled: frozenset[str] = frozenset()
"""What took effect last."""
_refusals: dict[str | None, Exception] = {}
"""Deploy YAML to the refusal of its last reading; None for an engine without one."""


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
    from omni_fastpath.commandline import is_headless  # noqa: PLC0415

    return Process.HEADLESS if is_headless(sys.argv[1:]) else Process.SERVER


def _register() -> None:
    named = any(name.startswith("OMNI_FASTPATH") for name in os.environ)
    stage = is_stage_process()
    if not stage:
        # What an ancestor handed to its stages is not for a server that was started below it, nor for its engines.
        os.environ.pop(HANDOFF, None)
    if named and _register_master_off():
        return
    if stage:
        _register_stage()
        return
    _arm(READER_MODULE, _wrap_reader)
    if named:
        _register_environment()


def _register_master_off() -> bool:
    """``OMNI_FASTPATH=0``: touch nothing; only say so where somebody may ask a server or a stage what it is."""
    from omni_fastpath import envs  # noqa: PLC0415

    if not envs.master_off(os.environ):
        return False
    if is_stage_process() or ("--omni" in sys.argv[1:] and sys.argv[1] != "bench"):
        from omni_fastpath.declare import State  # noqa: PLC0415

        _set_all(State.OFF, "OMNI_FASTPATH=0")
        _publish("environment")
    return True


def _register_stage() -> None:
    """A spawned stage takes what its parent resolved, or nothing."""
    if HANDOFF not in os.environ:
        return
    try:
        from omni_fastpath import handoff  # noqa: PLC0415
        from omni_fastpath.install import apply  # noqa: PLC0415
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415

        resolved = handoff.receive(PATCHES, os.environ)
    except Exception as error:
        logger.exception("omni-fastpath: what the parent handed over cannot be taken; this stage runs as stock")
        _show_all_failed(f"what the parent handed over cannot be taken: {error!r}", HANDOFF)
        return
    if resolved is None or not resolved.asked:
        return
    _listen()
    try:
        apply(resolved, process_kind())
    finally:
        _publish(resolved.source)


def _register_environment() -> None:
    """Somebody may have set variables of ours: judge them before any stage, and install what they switch on."""
    from omni_fastpath import envs  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    if envs.said(os.environ, PATCHES):
        _arm_gates()
        _arm_environment()


def _arm_environment() -> None:
    """What the environment switches on by itself is installed when its modules are there, without a YAML."""
    from omni_fastpath import config  # noqa: PLC0415
    from omni_fastpath.install import RefusedError, modules_of  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    try:
        resolved = config.resolve([], os.environ, PATCHES, partial=True)
    except config.ConfigError:
        return  # a server refuses before it spawns a stage; a plain vLLM process is not our business
    if not resolved.asked:
        return
    # What other processes' patches patch may never be imported here; the gate tells the stages.
    here = [patch for patch in PATCHES if patch.name in resolved.enabled and process_kind() in patch.processes]
    needed = frozenset[str]().union(*(modules_of(patch) for patch in here))
    imported: set[str] = set()

    def one_more(name: str, _module: Any) -> None:
        imported.add(name)
        if imported != needed or _publisher is not None:
            return  # some are missing, or a deploy YAML was read in the meantime
        try:
            _take_effect(resolved, None)
        except RefusedError as error:
            # An import is no place to refuse in; the reading of the deploy YAML and the gate are: they resolve again.
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
        level = logging.INFO if "--omni" in sys.argv[1:] else logging.DEBUG
        logger.log(
            level,
            "omni-fastpath: %s:%s is gone: a fastpath block in a deploy YAML is not read, variables are",
            READER_MODULE,
            READER,
        )
        return
    setattr(module, READER, FunctionWrapper(raw, _wrapped_resolve_deploy_yaml))


def _wrapped_resolve_deploy_yaml(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Read as upstream does, then let the file's ``fastpath:`` block and the environment take effect.

    Raises:
        ConfigError: The block or a variable is wrong. The server does not start.
        RefusedError: A patch that was asked for cannot serve, or an error of ours keeps it from serving, and
            ``on_unsupported`` is ``fail``.
    """
    if getattr(_nesting, "reading", False):  # upstream recurses into base_config; the chain is ours to walk
        return wrapped(*args, **kwargs)
    _nesting.reading = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _nesting.reading = False
    _judge(str(args[0] if args else kwargs.get("path")), result)
    return result


# ---- The verdict ----


def _judge(source: str | None, deploy: Any) -> None:
    """Let a deploy YAML and the environment take effect, or refuse the server.

    Args:
        source: The file; None for an engine that has none.
        deploy: What upstream made of it.

    Raises:
        ConfigError: As ``_wrapped_resolve_deploy_yaml``.
        RefusedError: As ``_wrapped_resolve_deploy_yaml``.
    """
    try:
        _resolve_and_take_effect(source, deploy)
    except Exception as error:
        refusal = _refusal(error, source, deploy)
        if refusal is None:
            return
        _refusals[source] = refusal
        _arm_gates()
        if refusal is error:
            raise
        raise refusal from error
    _refusals.pop(source, None)


def _resolve_and_take_effect(source: str | None, deploy: Any) -> None:
    from omni_fastpath import config, deployyaml  # noqa: PLC0415
    from omni_fastpath.ledger import warn_once  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    blocks = [] if source is None else deployyaml.blocks_of(source, deploy)
    resolved = config.resolve(blocks, os.environ, PATCHES)
    for line in resolved.unknown:
        warn_once(line)
    with _lock:
        if not resolved.asked and _publisher is None:
            os.environ.pop(HANDOFF, None)  # in a fork of another server there is that one's
            return  # nobody asked for anything, now or before: stay invisible
        _take_effect(resolved, source)


def _refusal(error: Exception, source: str | None, deploy: Any) -> Exception | None:
    """Say what went wrong and show it; what refuses the server, or None where it goes on without us."""
    try:
        from omni_fastpath.config import ConfigError  # noqa: PLC0415
        from omni_fastpath.deployyaml import UnreadableError  # noqa: PLC0415
        from omni_fastpath.install import RefusedError  # noqa: PLC0415
    except Exception:  # a dependency of ours is broken: whatever it is, it is an error of ours
        return _refusal_for_own_error(error, source, deploy, RuntimeError)
    if isinstance(error, RefusedError):
        return error  # the ledger has the states with their reasons
    if isinstance(error, UnreadableError) or not isinstance(error, ConfigError):
        return _refusal_for_own_error(error, source, deploy, RefusedError)
    logger.error("omni-fastpath: the configuration is refused: %s", error)
    if not _enabled:  # else this is about an engine that does not start, and not about the one that runs
        _show_all_failed(f"the configuration is refused: {error}", source)
    return error


def _refusal_for_own_error(
    error: Exception, source: str | None, deploy: Any, refused: type[Exception]
) -> Exception | None:
    """The answer to an error of ours before the configuration is known: what can be read of it plainly decides."""
    said = any(name.startswith("OMNI_FASTPATH") for name in os.environ)
    block = deploy.get("fastpath") if isinstance(deploy, Mapping) else None
    if not said and not block:
        logger.warning("omni-fastpath: looking for what is asked for failed, and nobody asked for anything: %r", error)
        return None
    logger.error("omni-fastpath: the configuration cannot take effect: %r", error, exc_info=error)
    word = os.environ.get("OMNI_FASTPATH_ON_UNSUPPORTED")
    if word is None and isinstance(block, Mapping):
        word = str(block.get("on_unsupported"))
    _show_all_failed(f"an error of omni-fastpath: {error!r}", source)
    if word is not None and word.strip().lower() == "fail":
        return refused(
            f"omni-fastpath: fastpath.on_unsupported is 'fail' and an error of ours is in the way: {error!r}"
        )
    os.environ.pop(HANDOFF, None)  # an earlier configuration's is not this one's
    return None


def _show_all_failed(reason: str, source: str | None) -> None:
    """State file and ledger for what the log has said: no patch that is not installed serves here."""
    try:
        from omni_fastpath.declare import State  # noqa: PLC0415
        from omni_fastpath.install import is_installed  # noqa: PLC0415
        from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415

        for patch in PATCHES:
            if not is_installed(patch.name):
                LEDGER.set(patch, State.FAILED, reason, said=True)
    except Exception:
        logger.exception("omni-fastpath: the states of the patches cannot be set")
    _publish_or_say(source)


# ---- The gate ----


def _arm_gates() -> None:
    """Have every engine that starts from now on come past the gate; nothing happens where it does already."""
    try:
        _arm(GATE_MODULE, lambda module: _wrap_gate(getattr(module, GATE_CLASS, None), GATE, _stage_runtime_gate))
        _arm(HEADLESS_GATE_MODULE, lambda module: _wrap_gate(module, HEADLESS_GATE, _headless_gate))
    except Exception:
        logger.exception("omni-fastpath: the gate before the stages cannot be written")


def _wrap_gate(owner: Any, name: str, gate: Callable[..., Any]) -> None:
    from wrapt import FunctionWrapper  # noqa: PLC0415

    from omni_fastpath.seams import MARK, is_ours  # noqa: PLC0415

    raw = vars(owner).get(name) if owner is not None else None
    if raw is None or is_ours(raw):
        return
    ours = FunctionWrapper(raw, gate)
    setattr(ours, MARK, "gate")
    setattr(owner, name, ours)


def _stage_runtime_gate(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    _before_stages(getattr(instance, "_config_path", None))
    return wrapped(*args, **kwargs)


def _headless_gate(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    _before_stages(None)
    return wrapped(*args, **kwargs)


def _before_stages(path: Any) -> None:
    """An engine is about to spawn its stages: refuse it if its configuration was refused, else it counts as started.

    An engine without a deploy YAML is judged here by the environment alone, unless one took effect in this process.

    Raises:
        ConfigError: As ``_wrapped_resolve_deploy_yaml``.
        RefusedError: As ``_wrapped_resolve_deploy_yaml``.
    """
    if path is not None:
        if (refusal := _refusals.get(str(path))) is not None:
            raise refusal
    elif _deploy_yaml is None:
        _judge(None, None)
    if _enabled:
        from omni_fastpath import engines  # noqa: PLC0415

        engines.started(_enabled)


# ---- Taking effect ----


def _take_effect(resolved: Resolved, source: str | None) -> None:
    """Install in this process, hand the result to the stages that it will spawn, and make it visible.

    Raises:
        RefusedError: As ``_wrapped_resolve_deploy_yaml``.
    """
    global _deploy_yaml, _enabled
    _listen()
    try:
        _install(resolved)
        _hand_on(resolved)
        _deploy_yaml, _enabled = source or _deploy_yaml, frozenset(resolved.enabled)
        if resolved.asked:
            _arm_gates()
    finally:
        _publish_or_say(source)


def _install(resolved: Resolved) -> None:
    from omni_fastpath.install import RefusedError, apply  # noqa: PLC0415

    try:
        apply(resolved, process_kind())
    except RefusedError:
        raise
    except Exception as error:
        _own_error(resolved, frozenset(resolved.enabled), f"installing failed: {error!r}", error)


def _hand_on(resolved: Resolved) -> None:
    if not resolved.asked:
        os.environ.pop(HANDOFF, None)
        return
    from omni_fastpath.declare import Process  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    try:
        from omni_fastpath import handoff  # noqa: PLC0415

        handoff.export(resolved)
    except Exception as error:
        os.environ.pop(HANDOFF, None)  # an earlier configuration's is not this one's
        theirs = frozenset(patch.name for patch in PATCHES if Process.STAGE in patch.processes)
        _own_error(resolved, theirs, f"the stages cannot be told: {error!r}", error)


def _own_error(resolved: Resolved, patches: frozenset[str], what: str, error: Exception) -> None:
    """The answer to an error of ours: ``failed`` for those of the patches that are on and not installed, or a refusal.

    Raises:
        RefusedError: ``on_unsupported`` is ``fail``.
    """
    from omni_fastpath.declare import State  # noqa: PLC0415
    from omni_fastpath.install import is_installed, refuse  # noqa: PLC0415
    from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    logger.error("omni-fastpath: %s", what, exc_info=error)
    for patch in PATCHES:
        if patch.name in patches and patch.name in resolved.enabled and not is_installed(patch.name):
            LEDGER.set(patch, State.FAILED, what)
    if resolved.on_unsupported == "fail":
        refuse(PATCHES, what)


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


def _publish_or_say(source: str | None) -> None:
    """``_publish`` for where its failure must not stand in the way of anything."""
    try:
        _publish(source or "environment")
    except Exception:
        logger.exception("omni-fastpath: the state of the patches cannot be published")


def _set_all(state: Any, reason: str) -> None:
    from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    for patch in PATCHES:
        LEDGER.set(patch, state, reason)
