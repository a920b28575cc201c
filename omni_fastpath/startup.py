"""How the package enters a process, and how the configuration takes effect there.

``register`` is the entry point of both plugin groups. Most processes that load plugins do not need this package, so
only the standard library and wrapt are imported until a deploy YAML is read or an engine starts. ``register`` raises
nothing but the refusal of a server, because any other exception would stop every vLLM process on the machine.

The configuration is resolved when a deploy YAML is read, so that a bad one refuses the server immediately. It takes
effect before an engine spawns its stages, with or without a deploy YAML. Three things can go wrong:

- The user's settings are invalid. The start is always refused.
- A patch cannot serve. ``on_unsupported`` decides.
- This package has an internal error, for example a dependency cannot be imported. ``on_unsupported`` decides, and the
  patches are ``failed``.

If no patch is enabled, no start is refused.

The three functions that the start-up wraps are seams too (``install.start_seams``). If one is missing, the
configuration is handled as soon as that is known: at registration, when upstream's module is imported, or when the next
YAML is read.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from omni_fastpath import process_role
from omni_fastpath.process_role import HANDOFF

if TYPE_CHECKING:
    from omni_fastpath.config import Resolved
    from omni_fastpath.statefile import Publisher

logger = logging.getLogger("vllm.omni_fastpath")

READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
"""Every reader of a deploy YAML calls it: ``load_deploy_config`` gets it from its module at each call."""

PLANS = ("vllm_omni.engine.stage_runtime", "StageRuntime._build_logical_stage_init_plans")
"""An engine calls it before it spawns its stages. Before that call the engine reads its deploy YAML once more and
ignores exceptions. A library user's ``Omni`` loads plugins only shortly before it, and may have no deploy YAML."""

HEADLESS = ("vllm_omni.engine.stage_engine_startup", "get_headless_replica_devices")
"""A headless server, which has no stage runtime, calls it before it spawns its stages."""


class RefusedError(RuntimeError):
    """A requested patch cannot serve under ``on_unsupported: fail``. The message names the patch and the reason."""


_registration = threading.Lock()
"""Acquired by the first registration, and never released."""


def register() -> None:
    """Prepare this process. Only the first call has an effect. It raises nothing but a refusal."""
    if not _registration.acquire(blocking=False):
        return
    try:
        role = process_role.spawned_as()
        if role is None:
            _register_server()
        elif process_role.master_off(os.environ):
            STARTUP.set_states("off", f"{process_role.MASTER}=0", role)
        elif HANDOFF in os.environ:
            STARTUP.take_over(role)
    except Exception as error:
        if _is_refusal(error):
            raise
        logger.exception("omni-fastpath: registration failed, so this process runs as stock")


def _register_server() -> None:
    """Prepare a server, or any other process in which vLLM loads plugins and that is no stage."""
    # A server that was started by a stage of another server must not use that server's configuration.
    os.environ.pop(HANDOFF, None)
    serves = process_role.is_serve(sys.argv)
    if process_role.master_off(os.environ):
        if serves:
            STARTUP.set_states("off", f"{process_role.MASTER}=0", "server")
        return
    if early := _already_starting():
        logger.error(
            "omni-fastpath: vLLM loads its plugins while another thread (%s) starts an engine. That engine may run as "
            "stock, and its deploy YAML and the variables may go unchecked. Make one engine before the next.",
            early,
        )
    wrap_starts(STARTUP)
    for slot in (READER, PLANS, HEADLESS) if serves else ():
        if not _is_there(slot[0]):
            STARTUP.on_missing(slot, "no such module")


def _already_starting() -> str:
    """The names of other threads that start an engine now. vLLM marks its plugins as loaded before it loads them."""
    frames = sys._current_frames()  # noqa: SLF001 - documented
    others = (each for each in threading.enumerate() if each is not threading.current_thread())
    return ", ".join(each.name for each in others if _is_in(PLANS[0], frames.get(each.ident or 0)))


def _is_in(module: str, frame: FrameType | None) -> bool:
    """Whether a frame or one of its callers runs code of a module."""
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _is_there(module: str) -> bool:
    """Whether a module is installed. Neither it nor its packages are imported."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top)
    for name in names:
        path = None if spec is None else spec.submodule_search_locations
        spec = None if path is None else importlib.machinery.PathFinder.find_spec(name, list(path))
    return spec is not None


class Startup:
    """The deploy YAMLs that this process has read, and the configuration that took effect."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._read: dict[str, Any] = {}
        self._last: str | None = None
        self._gone = False
        self._handed: Resolved | None = None
        self._publisher: Publisher | None = None
        self._has_hooks = False

    # ---- A server ----

    def on_read(self, given: Sequence[object], deploy: Any) -> None:
        """Refuse a server with an invalid configuration as soon as its deploy YAML is read.

        Args:
            given: The arguments of upstream's reader. The first is the file.
            deploy: Its result.

        Raises:
            ConfigError: The block or a variable is invalid.
        """
        try:
            source = str(given[0])
            self._read[source] = deploy
            asked = self._resolve(source).enabled
        except Exception as error:
            if _is_refusal(error):
                _refuse(error)
            logger.debug("omni-fastpath: %s cannot be resolved: %r; the engine's start will report it", given, error)
            return
        self._last = source
        if self._gone and asked:
            self.before_stages(source, _role())

    def on_missing(self, slot: tuple[str, str], why: object) -> None:
        """Handle the configuration without one of the three functions, which is missing or cannot be wrapped."""
        logger.warning("omni-fastpath: %s cannot be wrapped: %s", ":".join(slot), why)
        is_plain = sys.argv[1:2] == ["serve"] and not process_role.is_serve(sys.argv)  # of vLLM alone
        if slot in (READER, HEADLESS if _role() == "headless" else PLANS) and not is_plain:
            self._gone = True
            self.before_stages(self._last or process_role.value(sys.argv[1:], "--deploy-config"), _role())

    def before_stages(self, source: str | None, role: str) -> None:
        """Install the enabled patches before an engine spawns its stages, or refuse the engine.

        Args:
            source: The engine's deploy YAML. None if it has none, and for a headless server, whose last one is used.
            role: ``server`` or ``headless``.

        Raises:
            ConfigError: The block or a variable is invalid.
            RefusedError: ``on_unsupported`` is ``fail``, and a requested patch cannot serve or this package has an
                internal error.
        """
        source, resolved = self._last if role == "headless" else source, None
        with self._lock:
            try:
                resolved = self._resolve(source)
                self._take_effect(resolved, role)
            except Exception as error:
                if _is_refusal(error):
                    _refuse(error)
                self._answer(error, resolved, source, role)

    def _resolve(self, source: str | None) -> Resolved:
        from omni_fastpath import config  # noqa: PLC0415 - a server starts
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415

        blocks: list[config.Block] = []
        if source is not None:
            try:
                # There is no entry if upstream's reader could not be wrapped, or was wrapped too late.
                blocks = config.blocks_of(source, self._read.get(source))
            except config.UnreadableError as error:
                raise RuntimeError(str(error)) from error  # upstream has read it, so this is an internal error
        return config.resolve(blocks, os.environ, PATCHES)

    def _take_effect(self, resolved: Resolved, role: str) -> None:
        """Install the enabled patches, and pass the configuration to the stages that will be spawned."""
        from omni_fastpath import install  # noqa: PLC0415 - a server starts
        from omni_fastpath.declare import Process  # noqa: PLC0415
        from omni_fastpath.ledger import warn_once  # noqa: PLC0415

        for line in resolved.unknown:
            warn_once(line)
        if not resolved.enabled and self._publisher is None:
            return  # nothing is enabled, now or before, so nothing is published
        self._load_hooks()
        handed = resolved.below(self._handed)
        text = json.dumps({"parent": os.getpid(), "resolved": handed.to_json()})
        moved = start_problems() if resolved.enabled else []
        try:
            install.apply(resolved, Process(role), moved=moved)
        finally:
            self._publish(role, resolved.source)
        if kept := [each for each in handed.enabled if each not in resolved.enabled and not install.is_installed(each)]:
            warn_once(f"{', '.join(kept)}: also on in the stages of this engine, as in those of an earlier engine")
        if handed.enabled and not moved:
            self._handed, os.environ[HANDOFF] = handed, text

    def _answer(self, error: Exception, resolved: Resolved | None, source: str | None, role: str) -> None:
        """Handle an internal error: log it, show it as the state of the patches, and refuse under ``fail``.

        If the configuration could not be resolved, ``on_unsupported`` is read from the variable or the block directly.

        Raises:
            RefusedError: ``on_unsupported`` is ``fail``.
        """
        variables = process_role.own_variables(os.environ)
        block = self._read[source].get("fastpath") if source in self._read else None
        if not (variables or block):
            logger.warning("omni-fastpath: an internal error, but nothing is enabled: %r", error)
            return
        logger.error("omni-fastpath: the configuration cannot take effect: %r", error, exc_info=error)
        try:
            self.set_states("failed", f"an internal error of omni-fastpath: {error!r}", role, resolved)
        except Exception:
            logger.debug("omni-fastpath: the states of the patches cannot be shown", exc_info=True)
        word = variables.get(process_role.ON_UNSUPPORTED)
        if resolved is not None:
            word = resolved.on_unsupported
        elif word is None and isinstance(block, Mapping):
            word = str(block.get("on_unsupported"))
        if word is not None and word.strip().lower() == "fail":
            raise RefusedError(
                f"omni-fastpath: fastpath.on_unsupported is 'fail' and an internal error occurred: {error!r}"
            ) from error

    # ---- A process of a stage ----

    def take_over(self, role: str) -> None:
        """Install what an ancestor resolved. A stage cannot refuse the start, so after an error it runs as stock."""
        resolved = None
        try:
            resolved = _inherited()
            if resolved is None:
                return
            from omni_fastpath import install  # noqa: PLC0415 - something was asked for
            from omni_fastpath.declare import Process  # noqa: PLC0415

            self._load_hooks()
            install.apply(resolved, Process(role))
        except Exception as error:
            logger.exception("omni-fastpath: the parent's configuration cannot take effect, this stage runs as stock")
            if resolved is None or not _is_refusal(error):
                self.set_states("failed", f"the parent's configuration cannot take effect: {error!r}", role, resolved)
        self._publish(role, None if resolved is None else resolved.source)

    # ---- What is visible ----

    def set_states(self, state: str, reason: str, role: str, resolved: Resolved | None = None) -> None:
        """Set the state of the enabled patches that are not installed, or of all patches if ``resolved`` is unknown."""
        from omni_fastpath import install  # noqa: PLC0415 - something was asked for, or switched off
        from omni_fastpath.declare import State  # noqa: PLC0415
        from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415

        for patch in PATCHES:
            if (resolved is None or patch.name in resolved.enabled) and not install.is_installed(patch.name):
                LEDGER.set(patch, State(state), reason)
        self._publish(role, None if resolved is None else resolved.source)

    def _load_hooks(self) -> None:
        """Load the hook plugins, before the first patch has a state, so that they see every change."""
        if self._has_hooks:
            return
        self._has_hooks = True
        try:
            from omni_fastpath.hooks import HOOKS  # noqa: PLC0415 - pluggy, and the patches work without it
            from omni_fastpath.ledger import LEDGER  # noqa: PLC0415

            HOOKS.load()
            LEDGER.listen(HOOKS.on_patch_state)
        except Exception:
            logger.exception("omni-fastpath: hook plugins cannot be loaded, and the patches work without them")

    def _publish(self, role: str, source: str | None) -> None:
        """Start the state file and the metrics. A later call only updates the source of the configuration."""
        try:
            if self._publisher is not None:
                self._publisher.update(source or "environment")
                return
            from omni_fastpath import metrics  # noqa: PLC0415 - something was asked for
            from omni_fastpath.declare import Process  # noqa: PLC0415
            from omni_fastpath.statefile import Publisher  # noqa: PLC0415

            self._publisher = Publisher(Process(role), source or "environment")
            self._publisher.start()
            if role == "server" and not process_role.master_off(os.environ):
                metrics.export(Process.SERVER)
        except Exception:
            logger.exception("omni-fastpath: the states of the patches cannot be published")


def _inherited() -> Resolved | None:
    """The configuration from an ancestor of this process. None if the variable is from another process."""
    from omni_fastpath.config import Resolved  # noqa: PLC0415
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    handed = json.loads(os.environ[HANDOFF])
    if handed["parent"] not in process_role.ancestors(os.getpid()):
        logger.debug("omni-fastpath: %s is from process %s, no ancestor of this one", HANDOFF, handed["parent"])
        return None
    return Resolved.from_json(handed["resolved"], PATCHES)


def _is_refusal(error: Exception) -> bool:
    """Whether the error refuses a start. All other errors are internal ones."""
    try:
        from omni_fastpath.config import ConfigError  # noqa: PLC0415
    except Exception:  # a dependency cannot be imported, so this class cannot have been raised
        return False
    return isinstance(error, (ConfigError, RefusedError))


def _refuse(error: Exception) -> NoReturn:
    """End ``vllm serve`` with the message alone. A program that embeds an engine gets the exception.

    Upstream's orchestrator thread cannot end the process by an exception, and would log it with three tracebacks. It
    has spawned nothing yet.
    """
    if process_role.is_serve(sys.argv):
        refusal = f"omni-fastpath: start refused: {error}"
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(refusal) from None
        print(refusal, file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)
    logger.error("omni-fastpath: start refused: %s", error)
    raise error


def start_problems() -> list[str]:
    """The functions of the start-up that the installed vLLM-Omni does not have. This imports their modules."""
    from omni_fastpath.declare import Relies  # noqa: PLC0415
    from omni_fastpath.seams import SeamMovedError, find  # noqa: PLC0415

    problems = []
    for slot in (READER, PLANS, HEADLESS):
        try:
            if not callable(getattr(find(Relies(*slot)).owner, slot[1].rpartition(".")[2], None)):
                problems.append(f"{':'.join(slot)} is gone")
        except SeamMovedError as error:
            problems.append(str(error))
    return problems


def _role() -> str:
    return "headless" if "--headless" in sys.argv else "server"


def wrap_starts(startup: Startup) -> None:
    """Wrap the three functions, each as soon as its module is imported.

    If nothing is enabled, no other function is wrapped.
    """
    from wrapt import register_post_import_hook  # noqa: PLC0415 - not in a process of a stage

    nesting = threading.local()

    def wrapped_reader(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        if getattr(nesting, "reading", False):  # upstream recurses into base_config, and config.py reads that chain
            return wrapped(*args, **kwargs)
        nesting.reading = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            nesting.reading = False
        startup.on_read((*args, *kwargs.values()), result)
        return result

    def wrapped_plans(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        path = getattr(instance, "_config_path", None)
        startup.before_stages(None if path is None else str(path), "server")
        return wrapped(*args, **kwargs)

    def wrapped_headless(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        startup.before_stages(None, "headless")
        return wrapped(*args, **kwargs)

    for slot, wrapper in ((READER, wrapped_reader), (PLANS, wrapped_plans), (HEADLESS, wrapped_headless)):
        register_post_import_hook(functools.partial(_wrap, startup, slot, wrapper), slot[0])


def _wrap(startup: Startup, slot: tuple[str, str], wrapper: Callable[..., Any], module: Any) -> None:
    """Wrap one function while upstream imports its module. Only a refusal may stop that import."""
    try:
        from wrapt import wrap_function_wrapper  # noqa: PLC0415 - as above

        wrap_function_wrapper(module, slot[1], wrapper)
    except Exception as error:
        startup.on_missing(slot, repr(error))


STARTUP = Startup()
"""The start-up of this process."""
