"""The wrappers of ``lean_front_end``: a summary's tables, and chunks of audio."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from io import BytesIO
from types import FunctionType
from typing import Any

import numpy as np

from omni_fastpath.guard import Call
from omni_fastpath.ledger import state_of

from . import pcm
from .summary_table import DebugTable, SummaryTable

_patch = state_of("lean_front_end")
_counters = _patch.counters
_filtering = _patch.guard("filtering the log")


# ---- The tables of a request's summary ----

_log = logging.getLogger("vllm_omni.metrics.stats")
_made: list[tuple[Any, dict[str, Any], Callable[..., str]]] = []
"""Upstream's ``_format_table``, the globals that it had, and the one that was made of it. Empty before that."""
_proven: set[int] = set()
"""Numbers of columns for which the text was compared with upstream's and was the same."""


def wrapped_format_table(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> str:
    """The text of a table. With ``summary: line`` it is logged only at DEBUG."""
    if _patch.options.summary == "full":
        return _table(wrapped, *args, **kwargs)
    if _to_debug not in _log.filters:
        _log.addFilter(_to_debug)
    return DebugTable(_table(wrapped, *args, **kwargs) if _log.isEnabledFor(logging.DEBUG) else "")


def _to_debug(record: logging.LogRecord) -> bool:
    """The filter of ``summary: line``, which logs a table at DEBUG."""
    with _filtering:
        if isinstance(record.args, tuple) and len(record.args) == 1 and type(record.args[0]) is DebugTable:
            if not _log.isEnabledFor(logging.DEBUG):
                _counters["left_out"] += 1
                return False
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return True


def _table(upstream: Call, title: str, data: Any, *rest: Any, **named: Any) -> str:
    """Upstream's text. The first table for each number of columns is compared with upstream's own."""
    columns = len(data) if isinstance(data, list) else 1
    found = upstream.function
    if not _made or _made[0][0] is not found or _made[0][1] != found.__globals__:
        names = {**found.__globals__, "PrettyTable": partial(SummaryTable, found.__globals__["PrettyTable"])}
        lean = FunctionType(found.__code__, names, found.__name__, found.__defaults__, found.__closure__)
        lean.__kwdefaults__ = found.__kwdefaults__
        _made[:] = [(found, dict(found.__globals__), lean)]
    text = _made[0][2](title, data, *rest, **named)
    if columns not in _proven:
        if text != upstream(title, data, *rest, **named):
            raise ValueError(f"a table of {columns} columns is not as PrettyTable prints it")
        _proven.add(columns)
    _counters["tables"] += 1
    return text


# ---- Chunks of audio ----

_MOST_HZ = 384_000
_PLAIN_CALL = 3
"""Number of positional arguments: file, samples, rate."""
_FORMS: dict[tuple[Any, Any], Callable[[Any, int], bytes]] = {
    ("WAV", None): pcm.wav,
    ("WAV", "PCM_16"): pcm.wav,
    ("RAW", "PCM_16"): pcm.raw,
}
_proven_formats: set[str] = set()
"""Formats for which a file was compared with soundfile's and was the same."""


def wrapped_write(wrapped: Call, _instance: Any, args: Any, kwargs: Any) -> None:
    """``soundfile.write``. One channel of floats into an empty buffer, as WAV or raw 16-bit PCM, is written here."""
    written = _file(args, kwargs)
    if written is not None and kwargs["format"] in _proven_formats:
        _counters["files"] += 1
        args[0].write(written)  # the last line, so that soundfile writes if anything failed before
    else:
        wrapped(*args, **kwargs)
        if written is not None:
            if args[0].getvalue() != written or args[0].tell() != len(written):
                raise ValueError(f"a {kwargs['format']} file is not as soundfile writes it")
            _proven_formats.add(kwargs["format"])


def _file(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """What soundfile would write, or None if it is left to soundfile."""
    if len(args) != _PLAIN_CALL or not kwargs.keys() <= {"format", "subtype"}:
        return None
    make = _FORMS.get((kwargs.get("format"), kwargs.get("subtype")))
    file, data, rate = args
    if make is None or type(file) is not BytesIO or file.closed or file.tell() or file.getbuffer().nbytes:
        return None
    if type(rate) is not int or not 0 < rate <= _MOST_HZ:
        return None
    if type(data) is not np.ndarray or data.dtype != np.float32 or data.ndim != 1 or data.size > pcm.MOST_SAMPLES:
        return None
    return make(data, rate) if np.isfinite(data).all() else None


def step_aside() -> None:
    """Log tables at INFO again."""
    _log.removeFilter(_to_debug)
    for kept in (_made, _proven, _proven_formats):
        kept.clear()
