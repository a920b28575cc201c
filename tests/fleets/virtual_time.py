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
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

TURN_S = 1e-6
"""What a turn of the event loop takes. More than nothing, so that a loop that only yields gets somewhere."""

_MOST_TURNS = 1_000_000
_EPOCH = 1_700_000_000.0
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
    """The event loop; ``now`` is its clock, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0
        super().__init__(_Timeless(self))

    def time(self) -> float:
        """The clock."""
        return self.now

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
        self.now += timeout if timeout > 0 else TURN_S

    def _write_to_self(self) -> None:
        """Nobody is on another thread, and nobody sleeps."""


def _named(functions: dict[Any, Callable[..., Any]]) -> list[tuple[Any, str, Any]]:
    """Where modules hold one of these functions under a name of their own."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES) and module is not None:
            found += [(module, key, value) for key, value in vars(module).items() if _is_one(value, functions)]
    return found


def _is_one(value: Any, functions: dict[Any, Any]) -> bool:
    return type(value) in {BuiltinFunctionType, FunctionType, MethodType} and value in functions


@contextmanager
def on(loop: VirtualLoop) -> Iterator[None]:
    """Let the ``time`` module, and who imported from it, tell the loop's clock."""
    stand_ins: dict[str, Callable[..., Any]] = {
        "time": lambda: _EPOCH + loop.now,
        "time_ns": lambda: int((_EPOCH + loop.now) * 1e9),
        "monotonic": lambda: loop.now,
        "monotonic_ns": lambda: int(loop.now * 1e9),
        "perf_counter": lambda: loop.now,
        "perf_counter_ns": lambda: int(loop.now * 1e9),
        "sleep": loop.spend,
    }
    functions = {getattr(time, name): stand_in for name, stand_in in stand_ins.items()}
    written: list[tuple[Any, str, Any]] = [(time, name, getattr(time, name)) for name in stand_ins]
    written += _named(functions)
    modules = len(sys.modules)
    for module, name, value in written:
        setattr(module, name, functions[value])
    try:
        yield
    finally:
        for module, name, value in written:
            setattr(module, name, value)
        if len(sys.modules) != modules:  # a module that was first imported meanwhile may hold a stand-in
            originals = {stand_in: original for original, stand_in in functions.items()}
            for module, name, value in _named(originals):
                setattr(module, name, originals[value])
