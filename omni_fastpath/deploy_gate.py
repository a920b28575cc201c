"""The functions of upstream that every start of a server calls, with ours around them.

These are the only slots that are written where nothing is asked for. The standard library and wrapt alone.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

from wrapt import register_post_import_hook, wrap_function_wrapper

READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
"""Every reading of a deploy YAML calls it: ``load_deploy_config`` looks it up in its module when it is called."""

PLANS = ("vllm_omni.engine.stage_runtime", "StageRuntime._build_logical_stage_init_plans")
"""What an engine calls before it spawns its stages, right after it has read its deploy YAML once more, with exceptions
swallowed. A library user's ``Omni`` loads plugins only shortly before, and an engine may have no deploy YAML."""

HEADLESS = ("vllm_omni.engine.stage_engine_startup", "get_headless_replica_devices")
"""The same for a headless server, which has no stage runtime."""

logger = logging.getLogger("vllm.omni_fastpath")

OnRead = Callable[[str, Any], None]
"""Called with a deploy YAML's path and with what upstream made of it. An exception refuses the server."""

BeforeStages = Callable[[str | None, Literal["server", "headless"]], None]
"""Called with the path of an engine's deploy YAML, None where it has none. An exception refuses the engine."""


def arm(on_read: OnRead, before_stages: BeforeStages) -> None:
    """Wrap the three functions, each when its module has been imported; at once where it is imported already."""
    nesting = threading.local()

    def wrapped_reader(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        if getattr(nesting, "reading", False):  # upstream recurses into base_config; the chain is ours to walk
            return wrapped(*args, **kwargs)
        nesting.reading = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            nesting.reading = False
        on_read(str(args[0] if args else kwargs["path"]), result)
        return result

    def wrapped_plans(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        path = getattr(instance, "_config_path", None)
        before_stages(None if path is None else str(path), "server")
        return wrapped(*args, **kwargs)

    def wrapped_headless(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
        before_stages(None, "headless")
        return wrapped(*args, **kwargs)

    for (module, name), wrapper in ((READER, wrapped_reader), (PLANS, wrapped_plans), (HEADLESS, wrapped_headless)):
        register_post_import_hook(functools.partial(_wrap, name, wrapper), module)


def _wrap(name: str, wrapper: Callable[..., Any], module: Any) -> None:
    """Write one slot; an error is logged and stays ours: upstream is importing the module."""
    try:
        wrap_function_wrapper(module, name, wrapper)
    except Exception as error:
        logger.warning("omni-fastpath: %s:%s cannot be wrapped: %r", module.__name__, name, error)
