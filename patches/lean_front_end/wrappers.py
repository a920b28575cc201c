"""The slots of ``lean_front_end``: a summary's tables, the events of a streamed answer, and chunks of audio."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np

from omni_fastpath.declare import State
from omni_fastpath.ledger import runtime

from . import pcm
from .other_globals import WithOtherGlobals
from .stream_events import Events
from .summary_table import DebugTable, SummaryTable

_runtime = runtime("lean_front_end")
_counters = _runtime.counters


def _step_aside(why: str) -> None:
    _runtime.report(State.FAILED, f"{why}; upstream works alone from here on")


# ---- The tables of a request's summary ----

_log = logging.getLogger("vllm_omni.metrics.stats")
_format_table: list[WithOtherGlobals] = []
"""The one in force, once there is one."""
_proven: set[int] = set()
"""Numbers of columns for which our text was compared with upstream's, and is the same."""


def wrapped_format_table(wrapped: Callable[..., str], _instance: Any, args: Any, kwargs: Any) -> str:
    """The text of a table; with ``summary: line`` for DEBUG alone."""
    if _runtime.has_failed:
        return wrapped(*args, **kwargs)
    if _runtime.options.summary == "full":
        return _table(wrapped, *args, **kwargs)
    if _to_debug not in _log.filters:
        _log.addFilter(_to_debug)
    return DebugTable(_table(wrapped, *args, **kwargs) if _log.isEnabledFor(logging.DEBUG) else "")


def _to_debug(record: logging.LogRecord) -> bool:
    """The filter of ``summary: line``: a record of a table goes to DEBUG."""
    if not (isinstance(record.args, tuple) and len(record.args) == 1 and type(record.args[0]) is DebugTable):
        return True
    if not _log.isEnabledFor(logging.DEBUG):
        _counters["left_out"] += 1
        return False
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return True


def _table(upstream: Any, title: str, data: Any, *rest: Any, **named: Any) -> str:
    """Upstream's text. The first of each number of columns is compared with what upstream itself makes."""
    columns = len(data) if isinstance(data, list) else 1
    try:
        if not _format_table or not _format_table[0].is_of(upstream):
            real = upstream.__globals__["PrettyTable"]
            _format_table[:] = [WithOtherGlobals(upstream, {"PrettyTable": partial(SummaryTable, real)})]
        text: str = _format_table[0].function(title, data, *rest, **named)
    except Exception as error:
        _step_aside(f"making a table failed: {error!r}")
        return str(upstream(title, data, *rest, **named))
    if columns not in _proven:
        expected: str = upstream(title, data, *rest, **named)
        if text != expected:
            _step_aside(f"a table of {columns} columns is not as PrettyTable prints it")
            return expected
        _proven.add(columns)
    _counters["tables"] += 1
    return text


# ---- The events of a streamed answer ----

_stream: list[WithOtherGlobals] = []
"""The one in force, once there is one."""


def wrapped_chat_completion_stream_generator(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncIterator[str]:
    """The events of one streamed chat answer, by upstream's generator with other classes for its models."""
    found: AsyncIterator[str]
    try:
        if not _runtime.has_failed:
            # Called through the class, with the instance as an argument, it is wrapt's partial of the function.
            upstream = getattr(wrapped, "__func__", None) or wrapped.__wrapped__
            if not _stream or not _stream[0].is_of(upstream):
                events = Events(upstream.__globals__, lambda: _runtime.has_failed, _step_aside, _counters)
                _stream[:] = [WithOtherGlobals(upstream, events.stand_ins)]
            found = _stream[0].function(instance, *args, **kwargs)
            _counters["streams"] += 1
            return found
    except Exception as error:
        _step_aside(f"setting up a stream failed: {error!r}")
    found = wrapped(*args, **kwargs)
    return found


# ---- Chunks of audio ----

_MOST_HZ = 384_000
_PLAIN_CALL = 3
"""Arguments by position: file, samples, rate."""
_FORMS: dict[tuple[Any, Any], Callable[[Any, int], bytes]] = {
    ("WAV", None): pcm.wav,
    ("WAV", "PCM_16"): pcm.wav,
    ("RAW", "PCM_16"): pcm.raw,
}
_proven_formats: set[str] = set()
"""Formats of which a file was compared with soundfile's, and is the same."""


def wrapped_write(wrapped: Callable[..., None], _instance: Any, args: Any, kwargs: Any) -> None:
    """``soundfile.write``: one channel of floats into an empty buffer, as WAV or raw 16-bit PCM, is written by us."""
    written: bytes | None = None
    if not _runtime.has_failed:
        try:
            written = _file(args, kwargs)
        except Exception as error:
            _step_aside(f"making a file failed: {error!r}")
    if written is not None and kwargs["format"] in _proven_formats:
        args[0].write(written)
        _counters["files"] += 1
        return
    wrapped(*args, **kwargs)
    if written is not None:
        if args[0].getvalue() == written and args[0].tell() == len(written):
            _proven_formats.add(kwargs["format"])
        else:
            _step_aside(f"a {kwargs['format']} file is not as soundfile writes it")


def _file(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """What soundfile would write; None where it is left to soundfile."""
    if len(args) != _PLAIN_CALL or not kwargs.keys() <= {"format", "subtype"}:
        return None
    form, subtype = kwargs.get("format"), kwargs.get("subtype")
    if type(form) is not str or type(subtype) not in (str, type(None)):  # others need not be hashable
        return None
    make = _FORMS.get((form, subtype))
    file, data, rate = args
    if make is None or type(file) is not BytesIO or file.closed or file.tell() or file.getbuffer().nbytes:
        return None
    if type(rate) is not int or not 0 < rate <= _MOST_HZ:
        return None
    if type(data) is not np.ndarray or data.dtype != np.float32 or data.ndim != 1 or data.size > pcm.MOST_SAMPLES:
        return None
    return make(data, rate) if np.isfinite(data).all() else None


def taken_off() -> None:
    """Tables are at INFO again; streams that run keep what they have."""
    _log.removeFilter(_to_debug)
    for kept in (_format_table, _stream, _proven, _proven_formats):
        kept.clear()
