"""The states of the patches in this process, with reasons, options in force and engagement counters.

Counters are plain integers. The one thread that does the work writes them and any thread reads them, so that a reader
may see a value that is an instant old.
"""

from __future__ import annotations

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
        origin: What switched it on or off; empty for a patch that nothing mentions.
        options: The values in force, an instance of the declaration's model.
        counters: Its engagement counters by name; written by the thread that does the work.
        remarks: What its declaration says about this release.
        same_as: The listed release that the installed one is the same code as; empty where that is listed itself.
        figures: Gives what its metrics show now, while it is installed; None for a patch without any.
    """

    patch: Patch
    state: State = State.OFF
    cause: str = "not asked for"
    origin: str = ""
    options: Any = field(init=False)
    counters: dict[str, int] = field(init=False)
    remarks: str = ""
    same_as: str = ""
    figures: Callable[[], Mapping[str, Any]] | None = None

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
        """Step aside: log the first error of the patch, and set its state to ``failed``. Never raises.

        The wrappers look at ``has_failed`` and leave everything to upstream from then on.

        Args:
            what: What failed, as the subject of a sentence.
            error: The exception.
        """
        if not self.has_failed:
            logger.error("omni-fastpath: %s: %s failed", self.patch.name, what, exc_info=error)
            self.report(State.FAILED, f"{what} failed: {error!r}; upstream works alone from here on")

    def guard(self, what: str) -> Guard:
        """A context for code of the patch alone; see ``Guard``."""
        return Guard(self, what)

    @property
    def reason(self) -> str:
        """The cause and the remarks; what it did is in its counters."""
        return "; ".join(filter(None, (self.cause, self.remarks)))

    def shown_figures(self) -> Mapping[str, Any]:
        """What its metrics show now; nothing from the first error on, which is logged."""
        figures = self.figures  # another thread may set it to None meanwhile
        try:
            return {} if figures is None else figures()
        except Exception:
            self.figures = None
            logger.exception("omni-fastpath: what %s has for /metrics cannot be read", self.patch.name)
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
                    "origin": entry.origin,
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
