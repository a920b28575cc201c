"""The guard between a patch and upstream: an error of the patch makes it step aside and never reaches upstream.

A wrapper gets upstream's function as a ``Call``, which remembers what came of it. So after an error of the wrapper the
caller gets upstream's own result, and upstream runs once. Other code of a patch is under a ``ledger.Guard``.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

from omni_fastpath.ledger import PatchState

Wrapper = Callable[[Any, Any, Any, Any], Any]
"""A wrapper for wrapt. Its parameters are upstream's function, its instance, and its arguments."""


class Call:
    """Upstream's function as it is passed to a wrapper. It remembers the outcome of the last call.

    Args:
        function: The function.

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
        """Call upstream's function."""
        self.was_made, self._error = True, None
        try:
            self._result = self.function(*args, **kwargs)
        except BaseException as error:
            self._error = error
            raise
        return self._result

    def on_purpose(self, error: Exception) -> Exception:
        """Mark an error that the wrapper raises on purpose, for upstream's caller. It is not a failure of the patch."""
        self._error = error
        return error

    def raised(self, error: BaseException) -> bool:
        """Whether the last call raised this error. It is then dropped, because its traceback refers to this object."""
        is_it = error is self._error
        if is_it:
            self._error = None
        return is_it

    def outcome(self) -> Any:
        """Return the result of the last call, or raise its exception."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error


class AwaitedCall(Call):
    """A ``Call`` of a coroutine function."""

    __slots__ = ()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call and await upstream's function."""
        self.was_made, self._error = True, None
        try:
            self._result = await self.function(*args, **kwargs)
        except BaseException as error:
            self._error = error
            raise
        return self._result


def guard_wrapper(entry: PatchState, wrapper: Wrapper, what: str, fits: Callable[[Any, Any, Any], bool]) -> Wrapper:
    """A wrapper whose own errors do not reach upstream.

    An exception that upstream's function did not raise makes the patch step aside. The caller then gets the result or
    the exception of the last call of that function. If it was not called yet, it is called now with the original
    arguments. So an effect that must not happen together with upstream's call belongs in the wrapper's last line.

    Args:
        entry: The patch.
        wrapper: The wrapper. It gets upstream's function as a ``Call``.
        what: The wrapper's name, as the subject of a sentence.
        fits: Whether upstream's function takes this instance and these arguments. If not, it alone is called. So a
            coroutine function too raises its ``TypeError`` at the call, by which uvicorn tells an application from a
            factory.
    """

    def around(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if entry.has_failed or not fits(instance, args, kwargs):
            return wrapped(*args, **kwargs)
        call = Call(wrapped)
        try:
            return wrapper(call, instance, args, kwargs)
        except BaseException as error:
            if call.raised(error) or not isinstance(error, Exception):
                raise
            entry.fail(what, error)
        return call.outcome() if call.was_made else wrapped(*args, **kwargs)

    async def awaited(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        call = AwaitedCall(wrapped)
        try:
            return await wrapper(call, instance, args, kwargs)
        except BaseException as error:
            if call.raised(error) or not isinstance(error, Exception):
                raise
            entry.fail(what, error)
        return call.outcome() if call.was_made else await wrapped(*args, **kwargs)

    def around_coroutine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if entry.has_failed or not fits(instance, args, kwargs):
            return wrapped(*args, **kwargs)
        return awaited(wrapped, instance, args, kwargs)

    return around_coroutine if inspect.iscoroutinefunction(wrapper) else around


_OURS = __name__.partition(".")[0]
_LIBRARIES = sys.stdlib_module_names | {"janus", "msgspec", "pluggy", "prometheus_client", "uvloop", "wrapt"}
"""Libraries. Their exceptions are attributed to their callers."""


def raised_by_us(error: BaseException) -> bool:
    """Whether an exception was raised by code of this package, or by a library that this package called.

    The innermost frame that is not in a library decides.
    """
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    roots = [root for root in (name.partition(".")[0] for name in names) if root not in _LIBRARIES]
    return bool(roots) and roots[-1] == _OURS
