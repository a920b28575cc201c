"""The measures in a benchmark client's result: their names, which direction is better, and which have a verdict.

The keys are upstream's (``vllm/benchmarks/serve.py``, ``vllm_omni/benchmarks/patch/patch.py``). Other keys, such as
counts and durations of audio, are not measures.
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
"""The number of verdicts besides the primary one. For more, six starts per arm would not be enough."""

JUDGED = (
    "median_audio_ttfp_ms",
    "median_ttft_ms",
    "median_e2el_ms",
    "request_throughput",
    "p99_audio_ttfp_ms",
    "p99_ttft_ms",
    "p99_e2el_ms",
    "p99_audio_underrun_s",
    "median_audio_rtf",
    "audio_throughput",
    "output_throughput",
    "median_tpot_ms",
    "median_itl_ms",
    "mean_e2el_ms",
)
"""The first of these that was measured is the default primary measure. The next ``OTHERS`` also have a verdict."""

_KNOWN: Mapping[str, tuple[str, str, Better]] = {
    "audio_ttfp_ms": ("first audio (TTFP)", "ms", "lower"),
    "ttft_ms": ("first text (TTFT)", "ms", "lower"),
    "e2el_ms": ("whole answer (E2EL)", "ms", "lower"),
    "audio_underrun_s": ("silence (underrun)", "s", "lower"),
    "audio_continuity_ok_rate": ("answers played without a silence", "", "higher"),
    "audio_rtf": ("time for a second of audio (RTF)", "s", "lower"),
    "tpot_ms": ("time for a token after the first (TPOT)", "ms", "lower"),
    "itl_ms": ("wait for the next text (ITL)", "ms", "lower"),
    "image_generation_ms": ("image", "ms", "lower"),
    "video_generation_ms": ("video", "ms", "lower"),
    "request_throughput": ("requests served", "req/s", "higher"),
    "request_goodput": ("requests served in time", "req/s", "higher"),
    "output_throughput": ("text made", "tok/s", "higher"),
    "total_token_throughput": ("text read and made", "tok/s", "higher"),
    "audio_throughput": ("audio made", "s/s", "higher"),
    "video_throughput": ("video made", "s/s", "higher"),
    "image_throughput": ("images made", "img/s", "higher"),
}
"""Name, unit and direction by upstream's name, in the order of the table. Measures of single requests have a prefix:
mean, median or a percentile."""

_STATISTIC = re.compile(r"^(mean|median|p\d+(?:\.\d+)?)_")


def _name(key: str) -> str:
    return _STATISTIC.sub("", key, count=1)


def title(key: str) -> str:
    """The name of a client's key in a table, such as ``first audio (TTFP), median``."""
    return ", ".join([_KNOWN[_name(key)][0], *_STATISTIC.findall(key)[:1]])


def _has_value(name: str, value: Any) -> bool:
    """Whether there is a value. Upstream writes 0 if there is none, which is not a possible value of most measures."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return value != 0 or _KNOWN[name][2] == "higher" or name == "audio_underrun_s"


def read(result: Mapping[str, Any]) -> dict[str, float]:
    """The measures of a client's result by key, without those that have no value."""
    names = {key: _name(key) for key in result if _name(key) in _KNOWN}
    return {key: float(result[key]) for key, name in names.items() if _has_value(name, result[key])}


def check_primary(primary: str | None, starts: Sequence[Start]) -> None:
    """Refuse a primary measure that no start has.

    Raises:
        ConfigError: It was not measured.
    """
    measured = sorted({key for start in starts for key in start.measured})
    if primary is not None and primary not in (*measured, *map(title, measured)):
        raise unknown("--primary", primary, measured, found=f"{primary}, which was not measured")


def table(starts: Sequence[Start], *, primary: str | None = None) -> list[Measure]:
    """The measures of these starts, in the order of ``_KNOWN``.

    A measure that is zero in all starts is left out, except for the underrun if there was audio.

    Args:
        starts: The starts of both arms.
        primary: The key or the name of the primary measure. If it was not measured, the first of ``JUDGED`` is.
    """
    measured = [(key, value) for start in starts for key, value in start.measured.items() if _name(key) in _KNOWN]
    has_audio = any(_name(key) == "audio_ttfp_ms" for key, _ in measured)
    known = {key for key, value in measured if value or (has_audio and _name(key) == "audio_underrun_s")}
    keys = sorted(known, key=lambda key: ([*_KNOWN].index(_name(key)), key))
    named = [key for key in keys if primary in (key, title(key))]
    judged = [key for key in dict.fromkeys((*named, *JUDGED)) if key in keys][: 1 + OTHERS]
    return [_measure(key, primary=key in judged[:1], judged=key in judged[1:]) for key in keys]


def _measure(key: str, *, primary: bool, judged: bool) -> Measure:
    _, unit, better = _KNOWN[_name(key)]
    return Measure(
        group="",
        name=title(key),
        unit=unit,
        better=better,
        read=lambda start: start.measured.get(key, math.nan),
        digits={"ms": 1, "": 3, "s": 3}.get(unit, 2),
        judged=judged,
        primary=primary,
    )
