"""The slot of ``lean_stream``: upstream's own generator of a streamed answer, with other classes for its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import FunctionType
from typing import Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

from .events import Events

_runtime = runtime("lean_stream")
_counters = _runtime.counters


def _step_aside(why: str) -> None:
    _runtime.report(State.FAILED, f"{why}; upstream works alone from here on")


class _Lean:
    """Upstream's function with other classes, and the globals that it was made of."""

    def __init__(self, upstream: Any) -> None:
        names = dict(upstream.__globals__)
        self.upstream, self.names = upstream, names
        self.events = Events(names, lambda: _runtime.has_failed, _step_aside, _counters)
        ours = {**names, **self.events.stand_ins()}
        self.function = FunctionType(
            upstream.__code__, ours, upstream.__name__, upstream.__defaults__, upstream.__closure__
        )
        self.function.__kwdefaults__ = upstream.__kwdefaults__

    def is_of(self, upstream: Any) -> bool:
        """Whether it still does what upstream's would: nobody wrote into the module since."""
        return upstream is self.upstream and upstream.__globals__ == self.names


_lean: list[_Lean] = []
"""The one in force, once there is one."""


def wrapped_chat_completion_stream_generator(
    wrapped: Callable[..., AsyncIterator[str]], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncIterator[str]:
    """The events of one streamed chat answer."""
    if _runtime.has_failed:
        return wrapped(*args, **kwargs)
    try:
        options, function = _runtime.options, _function(wrapped)
        if options.unneeded == "once" and len(args) >= _REQUEST_ID and "text" not in (args[0].modalities or ("text",)):
            args = (args[0], _needed(args[1], frozenset(args[0].modalities), args[2]), *args[2:])
    except Exception as error:
        _step_aside(f"setting up a stream failed: {error!r}")
        return wrapped(*args, **kwargs)
    _counters["streams"] += 1
    if not options.tokens:
        return wrapped(*args, **kwargs)
    found: AsyncIterator[str] = function(instance, *args, **kwargs)
    return found


_REQUEST_ID = 3
"""Arguments up to the request's id, as upstream's one caller gives them by position."""


def _function(wrapped: Any) -> Callable[..., Any]:
    # Called through the class, with the instance as an argument, it is wrapt's partial of the function.
    upstream = getattr(wrapped, "__func__", None) or wrapped.__wrapped__
    if not _lean or not _lean[0].is_of(upstream):
        _lean[:] = [_Lean(upstream)]
    return _lean[0].function


async def _needed(results: Any, modalities: frozenset[str], request_id: str) -> AsyncIterator[Any]:
    """What a request asked for, and the first of each kind that it did not, of which upstream says so."""
    others: Counter[str] = Counter()
    try:
        async for result in results:
            kind = result.final_output_type
            if kind not in modalities:
                others[kind] += 1
                if others[kind] > 1:
                    _counters["left_out"] += 1
                    continue
            yield result
    finally:
        for kind, count in others.items():
            logger.warning(
                "omni-fastpath: %d outputs of type %s were not needed by request %s", count, kind, request_id
            )
        close = getattr(results, "aclose", None)
        if close is not None:
            await close()


def taken_off() -> None:
    """Streams that run keep what they have."""
    _lean.clear()
