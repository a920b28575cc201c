"""How the package enters a process, and how the configuration takes effect there.

``register`` is the entry point of both plugin groups. Most processes that load plugins do not need this package, so
only the standard library and wrapt are imported until a deploy YAML is read, an engine starts or a server shows that it
is off. ``register`` raises nothing, because any exception would stop every vLLM process on the machine.

Two upstream functions are wrapped in a server. Where a deploy YAML is read, a bad setting refuses the start at
once. Where an engine is about to spawn its stages, with or without a YAML, the configuration takes effect. Three things
can go wrong:

- A setting is invalid. The start is always refused.
- A patch cannot serve. Its state says so, and ``on_unsupported: fail`` refuses the start.
- Anything else is an error of this package. It is logged, and the process runs as stock.

If one of the two functions is gone, the log has one line that says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omni_fastpath import process_role
from omni_fastpath.process_role import HANDOFF, RefusedError

if TYPE_CHECKING:
    from omni_fastpath.config import Resolved
    from omni_fastpath.state import Publisher

logger = logging.getLogger("vllm.omni_fastpath")

READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
"""Every reader of a deploy YAML calls it: ``load_deploy_config`` gets it from its module at each call."""

START = ("vllm_omni.engine.stage_init_utils", "load_omni_transfer_config_for_model")
"""An engine and a headless server call it with their deploy YAML before they spawn stages."""

_IMPORTS_START = "vllm_omni.engine.stage_runtime"
"""It imports that function by name, maybe before this package can wrap it, so the name here is wrapped too."""

_registration = threading.Lock()
"""Acquired by the first registration, and never released."""


def register() -> None:
    """Prepare this process. Only the first call has an effect. It raises nothing."""
    if not _registration.acquire(blocking=False):
        return
    try:
        role = process_role.spawned_as()
        if role is None:
            # A server that was started by a stage of another server must not use that server's configuration.
            os.environ.pop(HANDOFF, None)
        serves = role is None and process_role.is_serve(sys.argv)
        if process_role.master_off(os.environ):
            if role or serves:
                STARTUP.set_states("off", f"{process_role.MASTER}=0", role or "server")
        elif role is None:
            wrap_starts(STARTUP)
            for slot in (READER, START) if serves else ():
                if not _is_there(slot[0]):
                    _say_it_moved(slot, "there is no such module")
        elif HANDOFF in os.environ:
            STARTUP.take_over(role)
    except Exception:
        logger.exception("omni-fastpath: registration failed, so this process runs as stock")


def wrap_starts(startup: Startup) -> None:
    """Wrap the two functions, each as soon as its module is imported."""
    from wrapt import register_post_import_hook  # noqa: PLC0415 - not in a process of a stage

    nesting = threading.local()

    def wrapped_reader(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        if getattr(nesting, "reading", False):  # upstream recurses into base_config
            return wrapped(*args, **kwargs)
        nesting.reading = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            nesting.reading = False
        startup.on_read(next(iter((*args, *kwargs.values())), None), result)
        return result

    def wrapped_start(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        path = kwargs.get("config_path", args[1] if len(args) > 1 else None)
        startup.before_stages(None if path is None else str(path))
        return wrapped(*args, **kwargs)

    for module, slot, wrapper in (
        (READER[0], READER, wrapped_reader),
        (START[0], START, wrapped_start),
        (_IMPORTS_START, START, wrapped_start),
    ):
        register_post_import_hook(functools.partial(_wrap, slot, wrapper), module)


def _wrap(slot: tuple[str, str], wrapper: Callable[..., Any], module: Any) -> None:
    """Wrap one function while upstream imports its module."""
    try:
        from wrapt import FunctionWrapper  # noqa: PLC0415 - as above

        function = getattr(module, slot[1], None)
        if function is None:
            if module.__name__ == slot[0]:
                _say_it_moved(slot, "it is gone")
            return
        # Else it is wrapped already, because it was imported from the other module just now.
        if getattr(function, "_self_wrapper", None) is not wrapper:
            setattr(module, slot[1], FunctionWrapper(function, wrapper))
    except Exception as error:
        _say_it_moved(slot, repr(error))


def _say_it_moved(slot: tuple[str, str], why: str) -> None:
    logger.error(
        "omni-fastpath: NO PATCH IS INSTALLED if settings ask for one: vLLM-Omni's %s, with which a start is seen, "
        "cannot be wrapped (%s). This omni-fastpath does not fit this vLLM-Omni.",
        ":".join(slot),
        why,
    )


def _is_there(module: str) -> bool:
    """Whether a module is installed. Neither it nor its packages are imported."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top)
    places = spec.submodule_search_locations if spec is not None else None
    return any(Path(place, *names).with_suffix(".py").is_file() for place in places or ())


def start_problems() -> list[str]:
    """The two functions as far as the installed vLLM-Omni does not have them. This imports their modules."""
    problems = []
    for module, name in (READER, START):
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:  # importing an upstream module may raise anything
            problems.append(f"{module}:{name}: {error!r}")
    return problems


class Startup:
    """The configuration of this process, and what is visible of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._publisher: Publisher | None = None

    # ---- A server ----

    def on_read(self, path: object, deploy: Any) -> None:
        """Refuse a start with an invalid configuration as soon as its deploy YAML is read. Nothing is installed.

        Args:
            path: The file.
            deploy: Upstream's result for it and its bases.

        Raises:
            ConfigError: The block or a variable is invalid.
        """
        try:
            _resolve(str(path), deploy)
        except RefusedError as error:
            _refuse(error)
        except Exception as error:
            logger.debug("omni-fastpath: %s cannot be resolved: %r; the engine's start will report it", path, error)

    def before_stages(self, source: str | None) -> None:
        """Install the enabled patches before an engine spawns its stages, or refuse the engine.

        Args:
            source: The engine's deploy YAML. None if it has none.

        Raises:
            ConfigError: The block or a variable is invalid.
            RefusedError: ``on_unsupported`` is ``fail``, and a requested patch cannot serve.
        """
        with self._lock:
            resolved, role = None, "headless" if "--headless" in sys.argv else "server"
            try:
                read = getattr(importlib.import_module(READER[0]), READER[1])
                resolved = _resolve(source, None if source is None else read(source))
                self._take_effect(resolved, role)
            except RefusedError as error:
                _refuse(error)
            except Exception as error:
                logger.exception("omni-fastpath: the configuration cannot take effect, so this process runs as stock")
                self.set_states("failed", f"an internal error of omni-fastpath: {error!r}", role, resolved)
                if resolved is not None and resolved.on_unsupported == "fail":
                    _refuse(
                        RefusedError(f"fastpath.on_unsupported is 'fail' and there was an internal error: {error!r}")
                    )

    def _take_effect(self, resolved: Resolved, role: str) -> None:
        """Install the enabled patches, and pass the configuration to the stages that will be spawned."""
        from omni_fastpath import install  # noqa: PLC0415 - a server starts
        from omni_fastpath.declare import Process  # noqa: PLC0415
        from omni_fastpath.ledger import warn_once  # noqa: PLC0415
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415

        for line in resolved.unknown:
            warn_once(line)
        if not resolved.enabled and self._publisher is None:
            return  # nothing is enabled, now or before, so nothing is published
        self._load_hooks()
        handed = json.dumps({"parent": os.getpid(), "resolved": resolved.to_json()})
        try:
            install.apply(resolved, Process(role), PATCHES)
        finally:
            self._publish(role, resolved.source)
        if resolved.enabled:  # else the stages get what an earlier engine has, as this process keeps it
            os.environ[HANDOFF] = handed

    # ---- A process of a stage ----

    def take_over(self, role: str) -> None:
        """Install what an ancestor resolved. A stage cannot refuse the start, so after an error it runs as stock."""
        resolved = None
        try:
            from omni_fastpath import config, install  # noqa: PLC0415 - something was asked for
            from omni_fastpath.declare import Process  # noqa: PLC0415
            from omni_fastpath.patches import PATCHES  # noqa: PLC0415

            handed = json.loads(os.environ[HANDOFF])
            if handed["parent"] not in process_role.ancestors(os.getpid()):
                logger.debug("omni-fastpath: %s is from process %s, no ancestor", HANDOFF, handed["parent"])
                return
            resolved = config.Resolved.from_json(handed["resolved"], PATCHES)
            self._load_hooks()
            install.apply(resolved, Process(role), PATCHES)
        except Exception as error:
            logger.exception("omni-fastpath: the parent's configuration cannot take effect, this stage runs as stock")
            if not isinstance(error, RefusedError):
                self.set_states("failed", f"the parent's configuration cannot take effect: {error!r}", role, resolved)
        self._publish(role, None if resolved is None else resolved.source)

    # ---- What is visible ----

    def set_states(self, state: str, reason: str, role: str, resolved: Resolved | None = None) -> None:
        """Set the state of the enabled patches that are not installed, or of all patches if ``resolved`` is unknown."""
        try:
            from omni_fastpath import install  # noqa: PLC0415 - something was asked for, or switched off
            from omni_fastpath.declare import State  # noqa: PLC0415
            from omni_fastpath.ledger import LEDGER  # noqa: PLC0415
            from omni_fastpath.patches import PATCHES  # noqa: PLC0415

            for patch in PATCHES:
                if (resolved is None or patch.name in resolved.enabled) and not install.is_installed(patch.name):
                    LEDGER.set(patch, State(state), reason)
            self._publish(role, None if resolved is None else resolved.source)
        except Exception:
            logger.debug("omni-fastpath: the states of the patches cannot be shown", exc_info=True)

    def _load_hooks(self) -> None:
        """Load the hook plugins, before the first patch has a state, so that they see every change."""
        if self._publisher is not None:  # a second engine
            return
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
            from omni_fastpath.declare import Process  # noqa: PLC0415 - something was asked for
            from omni_fastpath.install import look_again  # noqa: PLC0415
            from omni_fastpath.state import Publisher  # noqa: PLC0415

            self._publisher = Publisher(Process(role), source or "environment", look_again)
            self._publisher.start()
        except Exception:
            logger.exception("omni-fastpath: the states of the patches cannot be published")


def _resolve(source: str | None, deploy: Any) -> Resolved:
    from omni_fastpath import config  # noqa: PLC0415 - a server starts
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415

    return config.resolve(None if source is None else config.block_of(source, deploy), os.environ, PATCHES)


def _refuse(error: RefusedError) -> NoReturn:
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


STARTUP = Startup()
"""The start-up of this process."""
