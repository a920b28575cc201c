"""Finding and calling hook plugins; one that raises is reported once and switched off.

Whatever a plugin raises is its own failure, ``SystemExit`` and ``CancelledError`` too: a hook is called between two
outputs, where nobody could be cancelled, and it has no business in ending a server. What a signal raises while a
plugin happens to run (Ctrl-C, upstream's handler of SIGTERM) is somebody else's, and is passed on.

When no plugin implements a hook, callers get None (or the default policy itself), so that pluggy is not on the path.
"""

from __future__ import annotations

import functools
import inspect
import operator
import signal
import threading
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from types import CodeType, FunctionType, MethodType
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
        self._unusable: dict[str, str] = {}
        self._switched_off: dict[str, str] = {}

    def told(self) -> dict[str, Any]:
        """The plugins by name, for the state file: those in use, and why others are not, cannot be or no longer are."""
        used = [name for name, plugin in self._pluggy.list_name_plugin() if plugin is not None]
        return {"used": used, "unusable": dict(self._unusable), "switched_off": dict(self._switched_off)}

    def load(self) -> None:
        """Register the plugins of the entry-point group, once; one that cannot be loaded is reported and left out."""
        if self._loaded:
            return
        self._loaded = True
        from importlib.metadata import entry_points  # noqa: PLC0415 - scanning costs; only when patches are on

        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                self.register(entry_point.load(), entry_point.name)
            except BaseException as error:
                if is_a_signals(error):
                    raise
                self._unusable[entry_point.name] = f"{type(error).__name__}: {error}"
                logger.exception("omni-fastpath: the hook plugin %s cannot be used; it is left out", entry_point.name)

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin.

        Raises:
            ValueError: It is registered already, or implements a hook as a wrapper, which could not be switched off,
                as something that would have to be awaited or iterated, or as an object that pluggy does not call.
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
            _refuse_marked_objects(plugin, registered)
            for caller in self._pluggy.get_hookcallers(plugin) or ():
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is plugin:
                        self._guard(caller.name, implementation)
        except BaseException:
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
        kind = _never_run(function)
        if kind is not None:
            raise ValueError(
                f"{implementation.plugin_name}: {hook} is {kind}; a hook is called, and neither awaited nor iterated"
            )
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
                return None if answer is None else _judged(hook, answer)
            except BaseException as error:
                if is_a_signals(error):
                    raise
                off = True
                self._switched_off[implementation.plugin_name] = f"{hook} raised {type(error).__name__}: {error}"
                logger.exception(
                    "omni-fastpath: hook %s of plugin %s raised; the plugin is switched off",
                    hook,
                    implementation.plugin_name,
                )
                if self._pluggy.is_registered(plugin):
                    self._pluggy.unregister(plugin)
                return None

        implementation.function = guarded  # type: ignore[misc] # final in the stubs; a slot like others at run time


def is_a_signals(error: BaseException) -> bool:
    """Whether a signal, and not the code that happened to run, raised this.

    Python runs signal handlers on the main thread, between two instructions of whatever is there. Python's own for
    Ctrl-C leaves no frame, so that there every KeyboardInterrupt counts; any other is in the traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = set(_handlers_code())
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _handlers_code() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        function = getattr(handler, "__func__", handler)  # of a bound method
        if isinstance(function, FunctionType):
            yield function.__code__


_KINDS: dict[str, Callable[[Any], bool]] = {
    "an async generator function": inspect.isasyncgenfunction,
    "an async function": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
}


def _never_run(function: object) -> str | None:
    """What a function is whose body would not run when it is called, in words; None for any other."""
    return next((kind for kind, test in _KINDS.items() if test(function)), None)


def _refuse_marked_objects(plugin: object, plugin_name: str | None) -> None:
    """Refuse what is marked as a hook and passed over by pluggy in silence: an object that can be called.

    Raises:
        ValueError: There is one.
    """
    for name in dir(plugin):
        value = inspect.getattr_static(plugin, name, None)  # runs no property of the plugin
        if isinstance(value, (FunctionType, MethodType, staticmethod, classmethod)):
            continue
        try:
            marked = isinstance(getattr(value, f"{PROJECT}_impl", None), dict)
        except Exception:  # noqa: S112 - an attribute of somebody else's that cannot be asked is no hook
            continue
        if marked:
            inner = value.func if isinstance(value, (functools.partial, functools.partialmethod)) else value
            kind = _never_run(inner) or _never_run(inspect.getattr_static(type(inner), "__call__", None))
            found = f"a {type(value).__name__} object" + (f" of {kind}" if kind else "")
            raise ValueError(f"{plugin_name}: {name} is {found}; make it a plain function or method")


def _judged(hook: str, answer: Any) -> Any:
    """The answer in its hook's type.

    Raises:
        TypeError: It is none, or work that nobody would do: what a plain function made that wraps an async one.
    """
    # An int, which a bool is too, goes first: asking the abstract classes costs 2 us a raw output.
    if not isinstance(answer, int) and isinstance(answer, (Awaitable, Generator, AsyncGenerator)):
        close = getattr(answer, "close", None)  # else Python warns that it was never awaited
        if callable(close):
            close()
        raise TypeError(f"returned a {type(answer).__name__}: a hook is called, and neither awaited nor iterated")
    return _ANSWERS[hook](answer) if hook in _ANSWERS else answer


HOOKS = HookManager()
"""This process's plugins."""
