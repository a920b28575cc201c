"""An event loop on a clock of its own: it never waits, and the same program runs in the same order each time.

Real are asyncio's tasks, futures and timers. Where nothing is ready the clock jumps to the next timer; each turn of the
loop takes a microsecond, and what costs processing time says so with ``spend``. A second costs what its work costs.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType
from typing import Any

TURN_S = 1e-6
"""What a turn of the event loop takes. More than nothing, so that a loop that only yields gets somewhere."""

_MOST_TURNS = 50_000
_ZEROS = {"time": 1_700_000_000.0, "monotonic": 0.0, "perf_counter": 0.0}
"""What each of the clocks shows when the event loop's shows nothing."""
_PACKAGES = ("omni_fastpath", "vllm_omni.engine", "vllm_omni.metrics", "vllm_omni.entrypoints", "vllm.v1.engine")


class StuckError(RuntimeError):
    """Nothing will ever happen again, or nothing but turns of the event loop does."""


class _Timeless(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._of = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self._of.turn(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop; ``now`` is its clock, in seconds.

    Args:
        on_sleep: Called where nothing is ready, before the clock jumps to the next timer.
    """

    def __init__(self, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.now = 1000.0
        self.turns = 0
        self._on_sleep = on_sleep
        super().__init__(_Timeless(self))

    def go_on(self, seconds: float) -> None:
        """Run for so long, and to the end of what is at work by then.

        Raises:
            StuckError: That took too many turns.
        """
        self.turns = 0
        self.call_at(self.now + seconds, self.stop)
        with _on(self):
            self.run_forever()

    def time(self, zero: float = 0.0) -> float:
        """The clock; another one that shows *zero* when it begins."""
        return zero + self.now

    def time_ns(self, zero: float) -> int:
        """The same in nanoseconds."""
        return int(self.time(zero) * 1e9)

    def spend(self, seconds: float) -> None:
        """Processing that takes so long: nothing else runs meanwhile, and timers are late."""
        self.now += max(seconds, 0.0)

    def turn(self, timeout: float | None) -> None:
        """A turn of the loop; with a timeout, nothing was ready.

        Raises:
            StuckError: Nothing will ever happen, or too many turns have gone by.
        """
        self.turns += 1
        if timeout is None:
            raise StuckError("nothing is ready and no timer is set")
        if self.turns > _MOST_TURNS:
            raise StuckError(f"{_MOST_TURNS} turns of the event loop")
        if timeout > 0:
            self._on_sleep()
        self.now += timeout if timeout > 0 else TURN_S

    def _write_to_self(self) -> None:
        """Nobody is on another thread, and nobody sleeps."""


_REAL = {name: getattr(time, name) for clock in _ZEROS for name in (clock, f"{clock}_ns")} | {"sleep": time.sleep}


@cache
def _places(_modules: int) -> list[tuple[Any, str, str]]:
    """Where modules hold one of the clock's functions, under which name, and which; one look a number of modules."""
    names = {function: name for name, function in _REAL.items()}
    found = [(time, name, name) for name in _REAL]
    for module in [each for name, each in sys.modules.items() if name.startswith(_PACKAGES) and each is not None]:
        found += [
            (module, key, names[value])
            for key, value in vars(module).items()
            if type(value) is BuiltinFunctionType and value in names
        ]
    return found


@contextmanager
def _on(loop: VirtualLoop) -> Iterator[None]:
    """Let the ``time`` module, and who imported from it, tell the loop's clock."""
    stand_ins: dict[str, Callable[..., Any]] = {"sleep": loop.spend}
    for clock, zero in _ZEROS.items():
        stand_ins |= {clock: partial(loop.time, zero), f"{clock}_ns": partial(loop.time_ns, zero)}
    places, modules = _places(len(sys.modules)), len(sys.modules)
    for module, key, name in places:
        setattr(module, key, stand_ins[name])
    try:
        yield
    finally:
        for module, key, name in places:
            setattr(module, key, _REAL[name])
        names = {id(stand_in): name for name, stand_in in stand_ins.items()}
        for module in [sys.modules[each] for each in list(sys.modules)[modules:] if each.startswith(_PACKAGES)]:
            for key, value in list(vars(module).items()):  # first imported meanwhile: it has stand-ins
                if id(value) in names:
                    setattr(module, key, _REAL[names[id(value)]])
