"""Find and call hook plugins. A plugin that raises is reported once and switched off.

This includes ``SystemExit`` and ``CancelledError``, because a hook is called between two outputs and must not end a
server. Only Ctrl-C is passed on. A plugin with a hook that would have to be awaited or iterated is refused.

If no plugin implements a hook, callers get None, so that pluggy is not called.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pluggy

from omni_fastpath.hooks.specs import ENTRY_POINT_GROUP, PROJECT, Specs
from omni_fastpath.ledger import logger


class HookManager:
    """Plugins of this process.

    A loop calls ``observer`` once and keeps the result. So a plugin that is registered later may be used by the next
    loop only.
    """

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(Specs)

    def load(self) -> None:
        """Register the plugins of the entry-point group. One that cannot be loaded is reported and left out."""
        from importlib.metadata import entry_points  # noqa: PLC0415 - scanning costs; only when patches are on

        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                self.register(entry_point.load(), entry_point.name)
            except BaseException as error:
                if _is_ctrl_c(error):
                    raise
                words = "cannot be used and is left out"
                if isinstance(error, pluggy.PluginValidationError):
                    words += " (0.4 removed is_routable, next_stage and deadline)"
                logger.exception("omni-fastpath: the hook plugin %s %s", entry_point.name, words)

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin.

        Raises:
            ValueError: It is registered already, implements no hook, or implements one as a wrapper, which could not be
                switched off, or as a coroutine function or generator.
            pluggy.PluginValidationError: It implements an unknown hook or one with other parameters.
        """
        if self._pluggy.is_registered(plugin):
            raise ValueError(f"{name or plugin!r} is already registered")
        try:
            registered = self._pluggy.register(plugin, name)
            self._pluggy.check_pending()
            callers = self._pluggy.get_hookcallers(plugin)
            if not callers:
                raise ValueError(f"{registered} has no function that is marked @hookimpl")  # noqa: TRY301 - undone below
            for caller in callers:
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is plugin:
                        self._guard(caller.name, implementation)
        except BaseException:
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            raise
        logger.info("omni-fastpath: hook plugin %s registered", registered)

    def unregister(self, plugin: object) -> None:
        """Remove a plugin."""
        self._pluggy.unregister(plugin)

    def observer(self, name: str) -> Callable[..., Any] | None:
        """The hook of that name, to be called with keywords, or None if no plugin implements it."""
        hook: pluggy.HookCaller = getattr(self._pluggy.hook, name)
        return hook if hook.get_hookimpls() else None

    def on_patch_state(self, patch: str, state: Any, reason: str) -> None:
        """Pass a change of a state on. It is a listener of the ledger."""
        self._pluggy.hook.on_patch_state(patch=patch, state=getattr(state, "value", state), reason=reason)

    def _guard(self, hook: str, implementation: pluggy.HookImpl) -> None:
        """Replace a plugin's function by one that switches the plugin off after an exception."""
        function, plugin, name = implementation.function, implementation.plugin, implementation.plugin_name
        unusual = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
        if implementation.hookwrapper or implementation.wrapper or any(is_one(function) for is_one in unusual):
            raise ValueError(f"{name}: {hook} is a hook wrapper, coroutine function or generator, which is refused")

        @functools.wraps(function)
        def guarded(*args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:
                if _is_ctrl_c(error):
                    raise
                logger.exception("omni-fastpath: hook %s of plugin %s raised, the plugin is switched off", hook, name)
                if self._pluggy.is_registered(plugin):
                    self._pluggy.unregister(plugin)

        implementation.function = guarded  # type: ignore[misc] # final in the stubs, but not at run time


def _is_ctrl_c(error: BaseException) -> bool:
    """Whether this is the user's Ctrl-C, which Python raises on the main thread."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


HOOKS = HookManager()
"""The plugins of this process."""
