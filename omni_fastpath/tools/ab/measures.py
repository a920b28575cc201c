"""The numbers that a benchmark client wrote, as measures: which way is better, and which get a verdict.

The names are upstream's (``vllm/benchmarks/serve.py``, ``vllm_omni/benchmarks/patch/patch.py``). What is not listed
here, counts and durations of audio among it, is no measure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omni_fastpath.config import unknown
from omni_fastpath.tools.ab.files import Start
from omni_fastpath.tools.ab.verdict import Better, Measure

OTHERS = 9
"""Verdicts besides the primary one: of more, six starts an arm could not tell all."""

JUDGED = (
    "median_audio_ttfp_ms",
    "median_ttft_ms",
    "median_e2el_ms",
    "request_throughput",
    "p99_audio_ttfp_ms",
    "p99_ttft_ms",
    "p99_e2el_ms",
    "audio_throughput",
    "output_throughput",
    "median_audio_rtf",
    "median_tpot_ms",
    "median_itl_ms",
    "mean_e2el_ms",
)
"""The first of these that was measured is the primary measure unless another is named, and ``OTHERS`` get a verdict."""

_KNOWN: Mapping[str, tuple[str, str, Better]] = {
    "audio_ttfp_ms": ("first audio", "ms", "lower"),
    "ttft_ms": ("first text", "ms", "lower"),
    "e2el_ms": ("end to end", "ms", "lower"),
    "tpot_ms": ("text after the first token", "ms", "lower"),
    "itl_ms": ("text after the first token", "ms", "lower"),
    "audio_rtf": ("audio against real time", "", "lower"),
    "audio_underrun_s": ("audio against real time", "s", "lower"),
    "audio_continuity_ok_rate": ("audio against real time", "", "higher"),
    "image_generation_ms": ("images and video", "ms", "lower"),
    "video_generation_ms": ("images and video", "ms", "lower"),
    "request_throughput": ("throughput", "req/s", "higher"),
    "request_goodput": ("throughput", "req/s", "higher"),
    "output_throughput": ("throughput", "tok/s", "higher"),
    "total_token_throughput": ("throughput", "tok/s", "higher"),
    "audio_throughput": ("throughput", "s/s", "higher"),
    "video_throughput": ("throughput", "s/s", "higher"),
    "image_throughput": ("throughput", "img/s", "higher"),
}
"""Group, unit and direction by name; upstream puts a mean, a median and percentiles before those of single requests."""

_STATISTIC = re.compile(r"(?:mean|median|p\d+(?:\.\d+)?)_")


def _name(key: str) -> str:
    match = _STATISTIC.match(key)
    return key[match.end() :] if match else key


def _has_value(name: str, value: Any) -> bool:
    """Whether it is a number; upstream writes 0 where no request had any, and of these no other is zero."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value != 0 or _KNOWN[name][2] == "higher" or name == "audio_underrun_s"


def read(result: Mapping[str, Any]) -> dict[str, float]:
    """Every measure of a client's result by its key, without those by which upstream says that there was nothing."""
    names = {key: _name(key) for key in result if _name(key) in _KNOWN}
    return {key: float(result[key]) for key, name in names.items() if _has_value(name, result[key])}


def check_primary(primary: str | None, starts: Sequence[Start]) -> None:
    """Refuse a primary measure that no start has.

    Raises:
        ConfigError: It was not measured.
    """
    measured = sorted({key for start in starts for key in start.measured})
    if primary is not None and primary not in measured:
        raise unknown("--primary", primary, measured, found=f"{primary}, which was not measured")


def table(starts: Sequence[Start], *, primary: str | None = None) -> list[Measure]:
    """The rows of these starts: what any of them measured and is not zero in all, in groups.

    Args:
        starts: Of both arms.
        primary: Key of the primary measure; unless it was measured, the first of ``JUDGED`` that was.
    """
    keys = [key for key in dict.fromkeys(key for each in starts for key in each.measured) if _is_shown(key, starts)]
    judged = [key for key in dict.fromkeys((primary, *JUDGED)) if key in keys][: 1 + OTHERS]
    rows = [_measure(key, primary=key in judged[:1], judged=key in judged[1:]) for key in keys]
    groups = [group for group, _, _ in _KNOWN.values()]
    return sorted(rows, key=lambda row: groups.index(row.group))


def _is_shown(key: str, starts: Sequence[Start]) -> bool:
    return any(start.measured.get(key) for start in starts)


def _measure(key: str, *, primary: bool, judged: bool) -> Measure:
    group, unit, better = _KNOWN[_name(key)]
    return Measure(
        group=group,
        name=key.removesuffix("_ms"),
        unit=unit,
        better=better,
        read=lambda start: start.measured.get(key, math.nan),
        digits={"ms": 1, "": 3, "s": 3}.get(unit, 2),
        judged=judged,
        primary=primary,
    )
