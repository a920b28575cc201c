"""The functions of upstream that a server's start comes through, with ours around them: the standard library and wrapt.

``Reader`` is the one that is written where nobody asks for anything. ``Gate`` is written when somebody does.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

from wrapt import FunctionWrapper, register_post_import_hook

READER_MODULE = "vllm_omni.config.stage_config"
READER = "resolve_deploy_yaml"
"""Every reader of a deploy YAML in 0.30 comes through it: ``load_deploy_config`` looks it up in its module when it is
called, however it was imported itself."""

GATES = (
    ("vllm_omni.engine.stage_runtime", "StageRuntime"),
    ("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine"),  # 0.22
)
GATE_METHOD = "_build_logical_stage_init_plans"
"""What an engine calls before it spawns its stages, right after it has read its deploy YAML once more, with exceptions
swallowed. It stands in one of the classes. A library user's ``Omni`` loads plugins only after its first reading, and an
engine without a deploy YAML reads nothing."""

HEADLESS_GATE_MODULE = "vllm_omni.engine.stage_engine_startup"
HEADLESS_GATE = "get_headless_replica_devices"
"""The same for a headless server, which has no stage runtime and looks this function up when it calls it."""

ENGINE_MODULE = "vllm_omni.engine.orchestrator"
"""What is imported where an engine of vLLM-Omni's is made, on every release, and in no process of plain vLLM."""

logger = logging.getLogger("vllm.omni_fastpath")


def when_imported(module: str, hook: Callable[[Any], None]) -> None:
    """Call ``hook`` with the module when it has been executed; now, if it has. The hook's errors stay ours."""

    def guarded(imported: Any) -> None:
        try:
            hook(imported)
        except Exception:
            logger.exception("omni-fastpath: preparing %s failed; this process may run as stock", module)

    register_post_import_hook(guarded, module)


class Reader:
    """The reading of deploy YAMLs.

    Args:
        judge: Given each file that upstream has read, and what upstream made of it. What it raises refuses the server.
    """

    def __init__(self, judge: Callable[[str, Any], None]) -> None:
        self._judge = judge
        self._nesting = threading.local()

    def arm(self) -> None:
        """Have every reading from now on judged."""
        when_imported(READER_MODULE, self.wrap)

    def wrap(self, module: Any) -> None:
        """Write the slot; one line where the reader is gone."""
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
        setattr(module, READER, FunctionWrapper(raw, self._wrapped_resolve_deploy_yaml))

    def _wrapped_resolve_deploy_yaml(self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self._nesting, "reading", False):  # upstream recurses into base_config; the chain is ours to walk
            return wrapped(*args, **kwargs)
        self._nesting.reading = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            self._nesting.reading = False
        self._judge(str(args[0] if args else kwargs.get("path")), result)
        return result


class Gate:
    """What every engine passes before its stages are spawned, once this is armed.

    Attributes:
        before_stages: Called with the deploy YAML of an engine that was not refused, None where it has none. What it
            raises refuses the engine.
    """

    def __init__(self) -> None:
        self.before_stages: Callable[[str | None], None] | None = None
        self._refusals: dict[str, Exception] = {}
        self._armed = False
        self._lock = threading.Lock()

    def close(self, source: str | None, refusal: Exception) -> None:
        """Refuse the engines of a deploy YAML by what its last reading raised; without one they are judged here."""
        if source is not None:
            self._refusals[source] = refusal
        self.arm()

    def open(self, source: str | None) -> None:
        """The last reading of this deploy YAML refused nobody."""
        if source is not None:
            self._refusals.pop(source, None)

    def arm(self) -> None:
        """Have every engine that starts from now on come past the gate; nothing happens where it does already."""
        with self._lock:
            if self._armed:
                return
            self._armed = True
        for module, name in GATES:
            when_imported(module, functools.partial(self._wrap_gate, name))
        when_imported(HEADLESS_GATE_MODULE, self._wrap_headless)

    def _wrap_gate(self, name: str, module: Any) -> None:
        _wrap(getattr(module, name, None), GATE_METHOD, self._wrapped_build_logical_stage_init_plans)

    def _wrap_headless(self, module: Any) -> None:
        _wrap(module, HEADLESS_GATE, self._wrapped_get_headless_replica_devices)

    def _wrapped_build_logical_stage_init_plans(
        self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any
    ) -> Any:
        path = getattr(instance, "_config_path", getattr(instance, "config_path", None))
        self._pass(None if path is None else str(path))
        return wrapped(*args, **kwargs)

    def _wrapped_get_headless_replica_devices(
        self, wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any
    ) -> Any:
        self._pass(None)
        return wrapped(*args, **kwargs)

    def _pass(self, source: str | None) -> None:
        if source is not None and (refusal := self._refusals.get(source)) is not None:
            raise refusal
        if self.before_stages is not None:
            self.before_stages(source)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    raw = vars(owner).get(name) if owner is not None else None
    if raw is not None:
        setattr(owner, name, FunctionWrapper(raw, wrapper))


GATE = Gate()
"""This process's."""
