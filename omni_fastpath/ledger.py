"""The state, options and counters of each patch in this process.

Counters are plain integers. The thread that does the work writes them, several only under a lock. Others read them
without a lock, so a value may be slightly out of date.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from omni_fastpath.declare import Patch, State

logger = logging.getLogger("vllm.omni_fastpath")
"""A child of vLLM's logger, so that its lines have the format of the server's log."""

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning once per process. It would be repeated otherwise, because a server reads its deploy YAML often."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("omni-fastpath: %s", message)


class Guard:
    """A context manager for code of a patch. An exception ends the block and makes the patch step aside.

    It goes no further. Call upstream outside of the block, so that upstream's exceptions are not caught. If that is not
    possible, ``raised_by_us`` distinguishes the two. A guard has no state, so all threads can share one object.

    Args:
        entry: The patch.
        what: What is done inside, as the subject of a sentence: "counting a raw output".
    """

    __slots__ = ("_entry", "_what")

    def __init__(self, entry: PatchState, what: str) -> None:
        self._entry, self._what = entry, what

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):  # there is none, or it is a cancellation, which is not an error
            return False
        self._entry.fail(self._what, error)
        return True


@dataclass
class PatchState:
    """The state, options and counters of one patch in this process. Its wrappers use it too.

    Attributes:
        patch: Its declaration.
        state: Its state.
        cause: Why it has that state. ``reason`` is this and the remarks.
        options: Its values, an instance of the declaration's model.
        counters: Its counters by name.
        remarks: The declaration's remarks about this release.
        same_as: The listed release with the same code as the installed one. Empty if the installed one is listed.
        figures: Returns the samples of its metrics, while it is installed. None if it has no metrics.
        step_aside: Releases everything that others wait for. It is called when the patch fails or is uninstalled.
    """

    patch: Patch
    state: State = State.OFF
    cause: str = "not asked for"
    options: Any = field(init=False)
    counters: dict[str, int] = field(init=False)
    remarks: str = ""
    same_as: str = ""
    figures: Callable[[], Mapping[str, Any]] | None = None
    step_aside: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.options = self.patch.options()
        self.counters = dict.fromkeys((counter.name for counter in self.patch.counters), 0)

    @property
    def has_failed(self) -> bool:
        """Whether the patch has failed, so that upstream's own code runs."""
        return self.state is State.FAILED

    def report(self, state: State, reason: str) -> None:
        """Set the patch's state, from its wrappers. A failed patch stays failed."""
        if not self.has_failed:
            LEDGER.set(self.patch, state, reason, level=None if state.is_trouble else logging.INFO)

    def fail(self, what: str, error: Exception) -> None:
        """Make the patch step aside: log its first error, set its state to ``failed``, and release waiting code.

        From then on its wrappers only call upstream's functions. Other code of the patch checks ``has_failed``. This
        method never raises.

        Args:
            what: What failed, as the subject of a sentence.
            error: The exception.
        """
        if not self.has_failed:
            logger.error("omni-fastpath: %s: %s failed", self.patch.name, what, exc_info=error)
            self.report(State.FAILED, f"{what} failed: {error!r}; from now on only upstream's code runs")
            try:
                if self.step_aside is not None:
                    self.step_aside()
            except Exception:
                logger.exception("omni-fastpath: %s: releasing failed", self.patch.name)

    def guard(self, what: str) -> Guard:
        """A ``Guard`` for code of the patch."""
        return Guard(self, what)

    @property
    def reason(self) -> str:
        """The cause and the remarks."""
        return "; ".join(filter(None, (self.cause, self.remarks)))

    def read_figures(self) -> Mapping[str, Any]:
        """The samples of its metrics. Empty if the patch has failed. An error while they are read is such a failure."""
        figures = self.figures  # another thread may set it to None meanwhile
        try:
            return {} if figures is None or self.has_failed else figures()
        except Exception as error:
            self.fail("showing figures", error)
            return {}


Listener = Callable[[str, State, str], None]


class Ledger:
    """The entries of this process, and the listeners for changes of their states (state file, hooks)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, PatchState] = {}
        self._listeners: list[Listener] = []

    def entry(self, patch: Patch) -> PatchState:
        """The entry of a patch. It is created on first use."""
        with self._lock:
            return self._entries.setdefault(patch.name, PatchState(patch))

    def named(self, name: str) -> PatchState:
        """The existing entry of a patch.

        Raises:
            KeyError: There is none.
        """
        return self._entries[name]

    def __iter__(self) -> Iterator[PatchState]:
        with self._lock:
            return iter(list(self._entries.values()))

    def listen(self, listener: Listener) -> None:
        """Call ``listener(name, state, reason)`` after every change of a state. Its exceptions are logged."""
        self._listeners.append(listener)

    def set(self, patch: Patch, state: State, cause: str, *, level: int | None = None) -> State:
        """Set a patch's state, and return it. A change is logged.

        Args:
            patch: Its declaration.
            state: The new state.
            cause: The reason, in words.
            level: The level of the log line. None means a warning for ``unsupported`` and ``failed``, and debug for
                other states, because ``install.apply`` logs a summary of those.
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
        # Figures are read without the lock, because a listener to their failure may wait for another lock. They are
        # read first, because that may change counters.
        figures = {entry.patch.name: entry.read_figures() for entry in self}
        with self._lock:
            return {
                name: {
                    "state": entry.state.value,
                    "reason": entry.reason,
                    "same_as": entry.same_as,
                    "options": entry.options.model_dump(),
                    "counters": dict(entry.counters),
                    **({"figures": figures[name]} if figures.get(name) else {}),
                }
                for name, entry in self._entries.items()
            }


LEDGER = Ledger()
"""The ledger of this process."""


def state_of(name: str) -> PatchState:
    """The entry of a patch, for its wrappers."""
    return LEDGER.named(name)
