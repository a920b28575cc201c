"""Finding and calling hook plugins; one that raises is reported once and switched off.

When no plugin implements a hook, callers get None (or the default policy itself), so that pluggy is not on the path.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pluggy

from omni_fastpath.hooks.specs import ENTRY_POINT_GROUP, PROJECT, BacklogView, RawOutputView, Specs
from omni_fastpath.ledger import logger

Policy = Callable[[RawOutputView], bool]

_ANSWERS: dict[str, Callable[[Any], Any]] = {"is_routable": bool, "next_stage": operator.index}
"""What becomes of an answer, for the hooks that have one."""


class HookManager:
    """Plugins of this process.

    ``policy``, ``chooser`` and ``observer`` are looked up once by the loop that uses them: a plugin that registers
    later is seen by the next loop, one that is switched off stays in the lookup and does nothing.
    """

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(Specs)
        self._loaded = False

    def load(self) -> None:
        """Register the plugins of the entry-point group, once; one that cannot be loaded is reported and left out."""
        if self._loaded:
            return
        self._loaded = True
        from importlib.metadata import entry_points  # noqa: PLC0415 - scanning costs; only when patches are on

        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                self.register(entry_point.load(), entry_point.name)
            except Exception:
                logger.exception("omni-fastpath: the hook plugin %s cannot be used; it is left out", entry_point.name)

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin.

        Raises:
            ValueError: It is registered already, or implements a hook as a wrapper, which could not be switched off.
            pluggy.PluginValidationError: It implements an unknown hook or one with other parameters.
        """
        try:
            registered = self._pluggy.register(plugin, name)
        except pluggy.PluginValidationError:
            if self._pluggy.is_registered(plugin):  # pluggy before 1.7 keeps what it had accepted, and we none of it
                self._pluggy.unregister(plugin)
            raise
        try:
            self._pluggy.check_pending()
            for caller in self._pluggy.get_hookcallers(plugin) or ():
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is plugin:
                        self._guard(caller.name, implementation)
        except Exception:
            self._pluggy.unregister(plugin)
            raise
        logger.info("omni-fastpath: hook plugin %s registered", registered)

    def unregister(self, plugin: object) -> None:
        """Take a plugin out."""
        self._pluggy.unregister(plugin)

    def policy(self, default: Policy) -> Policy:
        """What decides that a raw output ends a pass: ``default`` itself when no plugin has a say."""
        if not self._pluggy.hook.is_routable.get_hookimpls():
            return default
        ask = self._pluggy.hook.is_routable

        def decide(view: RawOutputView) -> bool:
            answer = ask(view=view)
            return default(view) if answer is None else answer

        return decide

    def chooser(self) -> Callable[[BacklogView], int | None] | None:
        """What chooses the next stage, or None when no plugin has a say."""
        ask = self._pluggy.hook.next_stage
        if not ask.get_hookimpls():
            return None

        def choose(view: BacklogView) -> int | None:
            chosen: int | None = ask(view=view)
            return chosen

        return choose

    def observer(self, name: str) -> Callable[..., Any] | None:
        """The hook of that name, to be called with keywords, or None when nobody implements it."""
        hook: pluggy.HookCaller = getattr(self._pluggy.hook, name)
        return hook if hook.get_hookimpls() else None

    def on_patch_state(self, patch: str, state: Any, reason: str) -> None:
        """Pass a change of the ledger on; the ledger's listener."""
        self._pluggy.hook.on_patch_state(patch=patch, state=getattr(state, "value", state), reason=reason)

    def _guard(self, hook: str, implementation: pluggy.HookImpl) -> None:
        if implementation.hookwrapper or implementation.wrapper:
            raise ValueError(f"{implementation.plugin_name}: {hook} is a hook wrapper; wrappers are not accepted")
        function = implementation.function
        plugin = implementation.plugin
        off = False

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            nonlocal off
            if off:
                return None
            try:
                answer = function(*args)
                # Here, where a failure is the plugin's: a tensor, for one, may have no truth value.
                return answer if answer is None or hook not in _ANSWERS else _ANSWERS[hook](answer)
            except Exception:
                off = True
                logger.exception(
                    "omni-fastpath: hook %s of plugin %s raised; the plugin is switched off",
                    hook,
                    implementation.plugin_name,
                )
                if self._pluggy.is_registered(plugin):
                    self._pluggy.unregister(plugin)
                return None

        implementation.function = guarded  # type: ignore[misc] # final in the stubs; a slot like others at run time


HOOKS = HookManager()
"""This process's plugins."""
