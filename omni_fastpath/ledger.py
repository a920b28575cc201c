"""What is true about every patch in this process: states, reasons, options in force and engagement counters.

Counters are plain integers written by the one thread that does the work and read by anyone; a reader may see one
that is an instant old. They cost an addition, and nothing when their patch is off.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_fastpath.declare import Options, Patch, State

logger = logging.getLogger("vllm.omni_fastpath")
"""A child of vLLM's logger, so that our lines stand among the server's in its format."""

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning that this process has not logged yet: a server reads its deploy YAML four times."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("omni-fastpath: %s", message)


_LEVELS = {
    State.OFF: logging.DEBUG,
    State.APPLIED: logging.INFO,
    State.NOT_APPLICABLE: logging.INFO,
    State.SUPERSEDED: logging.INFO,
    State.UNSUPPORTED: logging.WARNING,
    State.FAILED: logging.WARNING,
}


@dataclass
class Entry:
    """One patch in this process.

    Attributes:
        patch: Its declaration.
        state: What is true of it here.
        cause: Why it has this state.
        kept_by: Who keeps it from being taken off, of one that is no longer asked for; empty for nobody.
        origin: Who switched it on or off; empty for one that nobody mentions.
        options: The values in force; None before any were.
        counters: Its engagement counters by name.
        remarks: What is to be said of it here while it is applied, whatever the cause is.
        figures: Gives what its metrics show now, while it is installed; None for one that has none.
    """

    patch: Patch
    state: State = State.OFF
    cause: str = "not asked for"
    kept_by: str = ""
    origin: str = ""
    options: Options | None = None
    counters: dict[str, int] = field(default_factory=dict)
    remarks: str = ""
    figures: Callable[[], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        for counter in self.patch.counters:
            self.counters.setdefault(counter.name, 0)

    @property
    def reason(self) -> str:
        """Everything that there is to say about the state, as users read it."""
        remarks = self.remarks if self.state is State.APPLIED else ""
        kept = f"cannot be taken off: {self.kept_by}" if self.kept_by else ""
        return "; ".join(filter(None, (self.cause, remarks, kept)))

    def shown_figures(self) -> Mapping[str, Any]:
        """What its metrics show now; none from the first error on, which is said."""
        figures = self.figures  # another thread's error, or whoever takes the patch off, may end them meanwhile
        if figures is None:
            return {}
        try:
            return figures()
        except Exception:
            self.figures = None
            logger.exception("omni-fastpath: what %s has for /metrics cannot be read", self.patch.name)
            return {}


Listener = Callable[[str, State, str], None]


class Ledger:
    """The entries of this process, and who wants to hear of a change (state file, hooks)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._listeners: list[Listener] = []

    def entry(self, patch: Patch) -> Entry:
        """The entry of a patch, made on first use."""
        with self._lock:
            if patch.name not in self._entries:
                self._entries[patch.name] = Entry(patch)
            return self._entries[patch.name]

    def named(self, name: str) -> Entry:
        """The entry of a declared patch.

        Raises:
            KeyError: No such patch in this process.
        """
        with self._lock:
            return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def listen(self, listener: Listener) -> None:
        """Call ``listener(name, state, reason)`` after every change; an exception of its is logged, not raised."""
        self._listeners.append(listener)

    def set(self, patch: Patch, state: State, cause: str, *, kept_by: str = "", said: bool = False) -> None:
        """Set a patch's state; a real change is logged in one line at the state's level.

        Args:
            patch: Its declaration.
            state: What is true of it from now on.
            cause: Why, in words.
            kept_by: Who keeps it from being taken off, though nobody asks for it.
            said: Somebody has said already what concerns several patches; then the line is for debugging.
        """
        entry = self.entry(patch)
        with self._lock:
            if (entry.state, entry.cause, entry.kept_by) == (state, cause, kept_by):
                return
            entry.state, entry.cause, entry.kept_by = state, cause, kept_by
            reason = entry.reason
        logger.log(
            logging.DEBUG if said else _LEVELS[state], "omni-fastpath: %s %s: %s", patch.name, state.value, reason
        )
        for listener in list(self._listeners):
            try:
                listener(patch.name, state, reason)
            except Exception:
                logger.exception("omni-fastpath: a listener for patch states failed")

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Every patch as plain data, for the state file and the metrics."""
        with self._lock:
            entries = dict(self._entries)
        # Not under the lock: figures that fail report it, and a listener may take a lock of its own, under which
        # another thread asks the ledger. They may move counters, so they come first.
        figures = {name: entry.shown_figures() for name, entry in entries.items()}
        with self._lock:
            return {
                name: {
                    "state": entry.state.value,
                    "reason": entry.reason,
                    "origin": entry.origin,
                    "options": entry.options.model_dump() if entry.options is not None else {},
                    "counters": dict(entry.counters),
                    **({"figures": figures[name]} if figures[name] else {}),
                }
                for name, entry in entries.items()
            }

    def clear(self) -> None:
        """Forget everything; for tests."""
        with self._lock:
            self._entries.clear()
            self._listeners.clear()


LEDGER = Ledger()
"""This process's ledger."""


@dataclass(frozen=True)
class PatchRuntime:
    """What a patch's wrappers see of the machinery: their values, their counters and their state."""

    entry: Entry

    @property
    def options(self) -> Any:
        """The values in force: an instance of the declaration's options model."""
        return self.entry.options if self.entry.options is not None else self.entry.patch.options()

    @property
    def counters(self) -> dict[str, int]:
        """The engagement counters; written by the thread that does the work."""
        return self.entry.counters

    @property
    def has_failed(self) -> bool:
        """Whether an error of ours was reported: then upstream works alone."""
        return self.entry.state is State.FAILED

    def report(self, state: State, reason: str) -> None:
        """Set the patch's state for this process."""
        LEDGER.set(self.entry.patch, state, reason)


def runtime(name: str) -> PatchRuntime:
    """The runtime of a declared patch, for its wrappers."""
    return PatchRuntime(LEDGER.named(name))
