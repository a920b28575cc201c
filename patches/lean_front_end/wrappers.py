"""The slots of ``lean_front_end``: upstream makes a request's summary, we make its tables, or leave them out.

Upstream's function runs as it is, at its time, and its result is upstream's. What it logs meanwhile is held by a filter
on its logger, and goes where the option says. Besides, chunks of audio become WAV files without libsndfile.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sized
from functools import partial
from io import BytesIO
from types import FunctionType
from typing import Any

import numpy as np

from omni_fastpath.declare import State
from omni_fastpath.ledger import runtime

from . import pcm
from .table import LeanTable, Table
from .writer import Tally, Writer

_runtime = runtime("lean_front_end")
_counters = _runtime.counters

_log = logging.getLogger("vllm_omni.metrics.stats")


class _Call(threading.local):
    """What the summary that is being made on this thread holds back.

    Attributes:
        held: Its log records so far; None: they are written as they come.
        runs: Whether one is being made.
    """

    held: deque[logging.LogRecord] | None = None
    runs: bool = False


_call = _Call()


def _hold(record: logging.LogRecord) -> bool:
    """The filter: a record of a summary whose records are held back is not written now."""
    if _call.held is None:
        return True
    _call.held.append(record)
    return False


writer = Writer(_log.handle)
_tally = Tally()
_proven: set[int] = set()
"""Numbers of columns for which our text was compared with upstream's, and is the same."""


def _step_aside(why: str) -> None:
    _runtime.report(State.FAILED, f"{why}; upstream works alone from here on")


def wrapped_build_and_log_summary(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Upstream's summary of one request: its result and its effects are upstream's, its log records go our way."""
    if (
        not instance.log_stats or _call.runs or (_runtime.has_failed and writer.idle)
    ):  # else it would overtake what waits
        return wrapped(*args, **kwargs)
    options = _runtime.options
    _counters["requests"] += 1
    _call.runs = True
    summary: dict[str, Any] | None = None
    if options.summary != "full":
        if _hold not in _log.filters:
            _log.filters.insert(0, _hold)  # before others': theirs see a record once, when it is written
        _call.held = deque()
    try:
        summary = wrapped(*args, **kwargs)
    finally:
        held, _call.held, _call.runs = _call.held, None, False
        if held is not None:
            _let_go(held, options, summary)
    return summary


def _let_go(held: deque[logging.LogRecord], options: Any, summary: dict[str, Any] | None) -> None:
    """Write, hand on or leave out what one summary logged."""
    written: Iterable[logging.LogRecord] = held
    try:
        if options.summary == "thread":
            _counters["handed_over" if writer.put(tuple(held)) else "dropped"] += 1
            return
        if options.summary == "interval":
            _tally.add(summary, options.interval_s)
            written = _all_but(held, left_out=lambda _record: True)
        elif not all(map(_is_table, held)):  # a request without a timing line keeps its tables: it leaves a trace
            written = _all_but(held, left_out=_is_table)
    except Exception as error:
        _step_aside(f"what to do with a summary failed: {error!r}")
    for record in written:  # what a handler raises is its own, as on stock
        _log.handle(record)


def _is_table(record: logging.LogRecord) -> bool:
    return isinstance(record.args, tuple) and len(record.args) == 1 and isinstance(record.args[0], Table)


def _all_but(
    held: Iterable[logging.LogRecord], left_out: Callable[[logging.LogRecord], bool]
) -> list[logging.LogRecord]:
    """What is written: all that is not left out, and what is, at DEBUG."""
    debug = _log.isEnabledFor(logging.DEBUG)
    written = []
    for record in held:
        if left_out(record):
            if not debug:
                _counters["left_out"] += 1
                continue
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        written.append(record)
    return written


def wrapped_format_table(wrapped: Callable[..., str], _instance: Any, args: Any, kwargs: Any) -> Any:
    """The text of a table, made by upstream's function with our table class; while records are held back, later."""
    if _runtime.has_failed or not _call.runs:
        return wrapped(*args, **kwargs)
    if _call.held is not None or not _log.isEnabledFor(logging.INFO):  # nobody reads it now, or ever
        try:
            return Table(partial(_format_table, wrapped), *args, **kwargs)
        except Exception as error:
            _step_aside(f"putting a table off failed: {error!r}")
            return wrapped(*args, **kwargs)
    return _format_table(wrapped, *args, **kwargs)


def _format_table(upstream: Callable[..., str], title: str, data: Any, *rest: Any, **named: Any) -> str:
    """Upstream's text. The first of each number of columns is compared with what upstream itself makes."""
    if _runtime.has_failed:
        return upstream(title, data, *rest, **named)
    columns = len(data) if isinstance(data, Sized) and not isinstance(data, dict) else 1
    try:
        text: str = _lean(upstream)(title, data, *rest, **named)
    except Exception as error:
        text = upstream(title, data, *rest, **named)  # if it fails as well, the error is upstream's own
        _step_aside(f"making a table failed: {error!r}")
        return text
    if columns not in _proven:
        expected = upstream(title, data, *rest, **named)
        if text != expected:
            _step_aside(f"a table of {columns} columns is not as PrettyTable prints it")
            return expected
        _proven.add(columns)
    _counters["tables"] += 1
    return text


_functions: dict[Callable[..., str], Callable[..., str]] = {}


def _lean(upstream: Any) -> Callable[..., str]:
    """Upstream's own ``_format_table`` with another ``PrettyTable``: the same code with other globals."""
    found = _functions.get(upstream)
    if found is None:
        names = {**upstream.__globals__, "PrettyTable": partial(LeanTable, upstream.__globals__["PrettyTable"])}
        found = FunctionType(upstream.__code__, names, upstream.__name__, upstream.__defaults__, upstream.__closure__)
        found.__kwdefaults__ = upstream.__kwdefaults__
        _functions[upstream] = found
    return found


_MOST_HZ = 384_000
_proven_formats: set[str] = set()
"""Formats of which a file was compared with soundfile's, and is the same."""


def wrapped_write(wrapped: Callable[..., None], _instance: Any, args: Any, kwargs: Any) -> None:
    """``soundfile.write``: one channel of floats into an empty buffer, as WAV or raw 16-bit PCM, is written by us."""
    written: bytes | None = None
    if not _runtime.has_failed and _runtime.options.wav:
        try:
            written = _file(args, kwargs)
        except Exception as error:
            _step_aside(f"making a file failed: {error!r}")
    if written is None:
        wrapped(*args, **kwargs)
        return
    file, form = args[0], kwargs["format"]
    if form in _proven_formats:
        try:
            file.write(written)
        except BufferError:  # somebody looks into the buffer: soundfile cannot write either, and says so its way
            wrapped(*args, **kwargs)
            return
        _counters["files"] += 1
        return
    wrapped(*args, **kwargs)
    if file.getvalue() == written and file.tell() == len(written):
        _proven_formats.add(form)
    else:
        _step_aside(f"a {form} file is not as soundfile writes it")


_PLAIN_CALL = 3
"""Arguments by position: file, samples, rate."""
_FORMS: dict[tuple[Any, Any], Callable[[Any, int], bytes]] = {
    ("WAV", None): pcm.wav,
    ("WAV", "PCM_16"): pcm.wav,
    ("RAW", "PCM_16"): pcm.raw,
}


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
    """Nothing is held back any more; what waits is written."""
    while _hold in _log.filters:
        _log.filters.remove(_hold)
    writer.close()
    _tally.tell()
    _functions.clear()
    _proven.clear()
    _proven_formats.clear()
