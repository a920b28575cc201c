"""The states of the patches in this process, with reasons, options in force and engagement counters.

Counters are plain integers. The one thread that does the work writes them and any thread reads them, so that a reader
may see a value that is an instant old.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from omni_fastpath.declare import Patch, State

logger = logging.getLogger("vllm.omni_fastpath")
"""A child of vLLM's logger, so that our lines stand among the server's in its format."""

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning that this process has not logged yet: a server reads its deploy YAML four times."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("omni-fastpath: %s", message)


@dataclass
class Entry:
    """One patch in this process, which its wrappers see too: its values, its counters, its state.

    Attributes:
        patch: Its declaration.
        state: Its state here.
        cause: Why it has this state.
        options: The values in force, an instance of the declaration's model.
        counters: Its engagement counters by name; written by the thread that does the work.
        remarks: What its declaration says about this release.
        same_as: The listed release that the installed one is the same code as; empty where that is listed itself.
        figures: Gives what its metrics show now, while it is installed; None for a patch without any.
        taken_off: Called when it has failed, as it is when it is taken off: releases what others wait for.
    """

    patch: Patch
    state: State = State.OFF
    cause: str = "not asked for"
    options: Any = field(init=False)
    counters: dict[str, int] = field(init=False)
    remarks: str = ""
    same_as: str = ""
    figures: Callable[[], Mapping[str, Any]] | None = None
    taken_off: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.options = self.patch.options()
        self.counters = dict.fromkeys((counter.name for counter in self.patch.counters), 0)

    @property
    def has_failed(self) -> bool:
        """Whether an error of ours was reported: then upstream works alone."""
        return self.state is State.FAILED

    def report(self, state: State, reason: str) -> None:
        """Set the patch's state for this process; for its wrappers. A patch that has failed stays failed."""
        if not self.has_failed:
            LEDGER.set(self.patch, state, reason, level=None if state.is_trouble else logging.INFO)

    def fail(self, what: str, error: Exception) -> None:
        """Step aside: log the first error of the patch, set its state to ``failed``, and release. Never raises.

        Its wrappers leave everything to upstream from then on. Other code of the patch looks at ``has_failed``.

        Args:
            what: What failed, as the subject of a sentence.
            error: The exception.
        """
        if not self.has_failed:
            logger.error("omni-fastpath: %s: %s failed", self.patch.name, what, exc_info=error)
            self.report(State.FAILED, f"{what} failed: {error!r}; upstream works alone from here on")
            try:
                if self.taken_off is not None:
                    self.taken_off()
            except Exception:
                logger.exception("omni-fastpath: %s: releasing failed", self.patch.name)

    def guard(self, what: str) -> Guard:
        """A context for code of the patch alone; see ``Guard``."""
        return Guard(self, what)

    def guarded(self, wrapper: Wrapper, what: str) -> Wrapper:
        """The wrapper as it is written into a slot: upstream's function gives its result whatever fails in the wrapper.

        Any exception that did not come out of upstream's function makes the patch step aside. Then the result, or the
        exception, is that of the last call of the function. Where there was none, it is called now with what was given.
        A wrapper with an effect that must not happen besides upstream's has it in its last line.

        Args:
            wrapper: Takes upstream's function as a ``Call``.
            what: The wrapper, as the subject of a sentence.
        """

        def guarded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if self.state is State.FAILED:
                return wrapped(*args, **kwargs)
            call = Call(wrapped)
            try:
                return wrapper(call, instance, args, kwargs)
            except Exception as error:
                if call.raised(error):
                    raise
                self.fail(what, error)
            return call.outcome() if call.was_made else wrapped(*args, **kwargs)

        async def guarded_await(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            call = AwaitedCall(wrapped)
            try:
                return await wrapper(call, instance, args, kwargs)
            except Exception as error:
                if call.raised(error):
                    raise
                self.fail(what, error)
            return call.outcome() if call.was_made else await wrapped(*args, **kwargs)

        def guarded_coroutine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if self.state is State.FAILED:
                return wrapped(*args, **kwargs)
            return guarded_await(wrapped, instance, args, kwargs)

        return guarded_coroutine if inspect.iscoroutinefunction(wrapper) else guarded

    @property
    def reason(self) -> str:
        """The cause and the remarks; what it did is in its counters."""
        return "; ".join(filter(None, (self.cause, self.remarks)))

    def shown_figures(self) -> Mapping[str, Any]:
        """What its metrics show now; nothing once the patch has failed, of an error of theirs too."""
        figures = self.figures  # another thread may set it to None meanwhile
        try:
            return {} if figures is None or self.has_failed else figures()
        except Exception as error:
            self.fail("showing figures", error)
            return {}


class Guard:
    """A context in which only code of a patch runs: an exception makes the patch step aside and ends the context.

    Upstream is called outside of it, so that what upstream raises passes untouched. Where the two cannot be separated
    that way, ``raised_by_us`` tells them apart. A guard has no state of its own: one object serves all threads.

    Args:
        entry: The patch.
        what: What is done inside, as the subject of a sentence: "looking at a raw output".
    """

    __slots__ = ("_entry", "_what")

    def __init__(self, entry: Entry, what: str) -> None:
        self._entry, self._what = entry, what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):  # nothing, or a cancellation, which is nobody's error
            return False
        self._entry.fail(self._what, error)
        return True


Wrapper = Callable[[Any, Any, Any, Any], Any]
"""Of wrapt: takes upstream's function, what it is bound to, and its arguments."""


class Call:
    """Upstream's function as a wrapper of ours sees it. It remembers what came of it.

    Args:
        function: Upstream's own, or what is in the slot.

    Attributes:
        was_made: Whether it was called.
    """

    __slots__ = ("_error", "_result", "function", "was_made")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.was_made = False
        self._result: Any = None
        self._error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's function is called."""
        self.was_made, self._error = True, None
        try:
            self._result = self.function(*args, **kwargs)
        except BaseException as error:
            self._error = error
            raise
        return self._result

    def meant(self, error: Exception) -> Exception:
        """The error, which the wrapper raises on purpose: it is for upstream's caller, and nothing has failed."""
        self._error = error
        return error

    def raised(self, error: BaseException) -> bool:
        """Whether the last call raised this error, which is forgotten: its traceback refers to us."""
        is_it = error is self._error
        if is_it:
            self._error = None
        return is_it

    def outcome(self) -> Any:
        """What the last call returned, or raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error


class AwaitedCall(Call):
    """The same of a coroutine function."""

    __slots__ = ()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's function is called and awaited."""
        self.was_made, self._error = True, None
        try:
            self._result = await self.function(*args, **kwargs)
        except BaseException as error:
            self._error = error
            raise
        return self._result


_OURS = __name__.partition(".")[0]
_LIBRARIES = sys.stdlib_module_names | {"janus", "msgspec", "pluggy", "prometheus_client", "uvloop", "wrapt"}
"""Modules whose exceptions are those of their callers."""


def raised_by_us(error: BaseException) -> bool:
    """Whether an exception was raised by code of this package, or by a library that this package called.

    The innermost frame decides that is no library's. Upstream's own code, and any code that is not known, is not ours.
    """
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    roots = [root for root in (name.partition(".")[0] for name in names) if root not in _LIBRARIES]
    return bool(roots) and roots[-1] == _OURS


Listener = Callable[[str, State, str], None]


class Ledger:
    """The entries of this process, and the listeners to their changes (state file, hooks)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._listeners: list[Listener] = []

    def entry(self, patch: Patch) -> Entry:
        """The entry of a patch, made on first use."""
        with self._lock:
            return self._entries.setdefault(patch.name, Entry(patch))

    def named(self, name: str) -> Entry:
        """The entry of a patch that has one.

        Raises:
            KeyError: No such patch in this process.
        """
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def listen(self, listener: Listener) -> None:
        """Call ``listener(name, state, reason)`` after every change; an exception that it raises is logged."""
        self._listeners.append(listener)

    def set(self, patch: Patch, state: State, cause: str, *, level: int | None = None) -> State:
        """Set a patch's state, and return it; a real change is logged in one line.

        Args:
            patch: Its declaration.
            state: The state from now on.
            cause: Why, in words.
            level: Of the line; None for a warning of trouble, and for a debug line of what ``install.apply`` sums up.
        """
        entry = self.entry(patch)
        with self._lock:
            if (entry.state, entry.cause) == (state, cause):
                return state
            entry.state, entry.cause = state, cause
            reason = entry.reason
        if level is None:
            level = logging.WARNING if state.is_trouble else logging.DEBUG
        logger.log(level, "omni-fastpath: %s", ": ".join(filter(None, (f"{patch.name} {state.value}", reason))))
        for listener in list(self._listeners):
            try:
                listener(patch.name, state, reason)
            except Exception:
                logger.exception("omni-fastpath: a listener for patch states failed")
        return state

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Every patch as plain data, for the state file and the metrics."""
        # Figures are read without the lock, since a listener to their failure may wait for a lock of its own; and
        # first, since reading them may move counters.
        figures = {entry.patch.name: entry.shown_figures() for entry in self}
        with self._lock:
            return {
                name: {
                    "state": entry.state.value,
                    "reason": entry.cause,
                    "remarks": entry.remarks,
                    "same_as": entry.same_as,
                    "options": entry.options.model_dump(),
                    "counters": dict(entry.counters),
                    **({"figures": figures[name]} if figures.get(name) else {}),
                }
                for name, entry in self._entries.items()
            }


LEDGER = Ledger()
"""This process's ledger."""


def runtime(name: str) -> Entry:
    """The entry of a declared patch, for its wrappers."""
    return LEDGER.named(name)
