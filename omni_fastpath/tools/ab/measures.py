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

PRIMARY = ("median_audio_ttfp_ms", "median_ttft_ms", "median_e2el_ms", "mean_e2el_ms", "request_throughput")
"""The first of these that was measured is the primary measure, unless another is named."""

JUDGED = (
    "median_audio_ttfp_ms",
    "p99_audio_ttfp_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_e2el_ms",
    "p99_e2el_ms",
    "request_throughput",
    "audio_throughput",
    "output_throughput",
    "median_audio_rtf",
    "median_tpot_ms",
    "median_itl_ms",
    "mean_e2el_ms",
    "mean_image_generation_ms",
    "mean_video_generation_ms",
    "image_throughput",
    "video_throughput",
)
"""The first of these that were measured get a verdict, as many as ``OTHERS``, unless others are named."""

_TIMES: Mapping[str, tuple[str, str]] = {
    "audio_ttfp_ms": ("first audio", "ms"),
    "ttft_ms": ("first text", "ms"),
    "e2el_ms": ("end to end", "ms"),
    "tpot_ms": ("text after the first token", "ms"),
    "itl_ms": ("text after the first token", "ms"),
    "audio_rtf": ("audio against real time", ""),
    "audio_underrun_s": ("audio against real time", "s"),
    "image_generation_ms": ("images and video", "ms"),
    "video_generation_ms": ("images and video", "ms"),
}
"""Group and unit of what upstream gives a mean, a median and percentiles of; less is better."""
_RATES: Mapping[str, tuple[str, str]] = {
    "audio_continuity_ok_rate": ("audio against real time", ""),
    "request_throughput": ("throughput", "req/s"),
    "request_goodput": ("throughput", "req/s"),
    "output_throughput": ("throughput", "tok/s"),
    "total_token_throughput": ("throughput", "tok/s"),
    "audio_throughput": ("throughput", "s/s"),
    "video_throughput": ("throughput", "s/s"),
    "image_throughput": ("throughput", "img/s"),
}
"""The same of what there is one number of; more is better."""
_ORDER = list(dict.fromkeys(group for group, _ in (*_TIMES.values(), *_RATES.values())))

_OF_REQUESTS = re.compile(r"(?:mean|median|p\d+(?:\.\d+)?)_(?P<what>.+)")
_OF_AUDIO = ("audio_continuity_ok_rate", "audio_underrun_s")
"""Of these upstream writes what is best where there was no audio at all: nothing was late."""


def known(key: str) -> tuple[str, str, Better] | None:
    """Group, unit and direction of a key; None where it is no measure."""
    if key in _RATES:
        return *_RATES[key], "higher"
    what = _what(key)
    return (*_TIMES[what], "lower") if what in _TIMES else None


def _what(key: str) -> str:
    match = _OF_REQUESTS.fullmatch(key)
    return match["what"] if match else key


def _is_none_at_zero(key: str) -> bool:
    """Whether upstream writes 0 where no request had any: no time is zero."""
    return _what(key) in _TIMES and _what(key) not in _OF_AUDIO


def read(result: Mapping[str, Any]) -> dict[str, float]:
    """Every measure of a client's result by its key, without those by which upstream says that there was nothing."""
    silent = result.get("audio_throughput") == 0
    found = {}
    for key, value in result.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or known(key) is None or (value == 0 and _is_none_at_zero(key)):
            continue
        # The same number under two names would be judged twice.
        twice = key.startswith("p50_") and f"median_{_what(key)}" in result
        if not twice and not (silent and _what(key) in _OF_AUDIO):
            found[key] = float(value)
    return found


def lacks(starts: Sequence[Start], arms: tuple[str, str]) -> tuple[list[str], bool]:
    """What upstream always writes and some starts have no value of: an arm that answers without audio.

    Returns:
        A sentence for each such measure, and whether any is lacking in a larger share of the second arm's starts.
    """
    a, b = ([start.measured for start in starts if start.arm == arm] for arm in arms)
    sentences, worse = [], False
    for key in dict.fromkeys(key for found in (*a, *b) for key in found if _is_none_at_zero(key)):
        without_a, without_b = (sum(key not in found for found in each) for each in (a, b))
        if without_a or without_b:
            sentences.append(
                f"{without_a} of {len(a)} starts of {arms[0]} and {without_b} of {len(b)} of {arms[1]} have no {key}"
            )
            worse = worse or without_b * len(a) > without_a * len(b)
    return sentences, worse


def table(starts: Sequence[Start], *, primary: str | None = None, judged: Sequence[str] = ()) -> list[Measure]:
    """The rows of these starts: what any of them measured and is not zero in all, in groups.

    Args:
        starts: Of both arms.
        primary: Key of the primary measure; unless given, the first of ``PRIMARY`` that was measured.
        judged: Keys of the others that get a verdict; unless given, the first of ``JUDGED`` that were measured.

    Raises:
        ConfigError: A key that was not measured was named.
    """
    measured = list(dict.fromkeys(key for start in starts for key in start.measured))
    for place, named in (("--primary", [primary] if primary else []), ("--judge", judged)):
        for key in named:
            if key not in measured:
                raise unknown(place, key, sorted(measured), found=f"{key}, which was not measured")
    asked_for = {primary, *judged}
    keys = [key for key in measured if key in asked_for or any(start.measured.get(key) for start in starts)]
    first = primary or next((key for key in (*PRIMARY, *keys) if key in keys), None)
    others = list(judged) or [key for key in JUDGED if key in keys and key != first][:OTHERS]
    rows = [_measure(key, primary=key == first, judged=key in others) for key in keys]
    return sorted(rows, key=lambda row: _ORDER.index(row.group))


def _measure(key: str, *, primary: bool, judged: bool) -> Measure:
    described = known(key)
    assert described is not None, "read leaves out what is no measure"
    group, unit, better = described
    return Measure(
        group=group,
        name=key.removesuffix("_ms"),
        unit=unit,
        better=better,
        read=lambda start: start.measured.get(key, math.nan),
        digits={"ms": 1, "": 3, "s": 3}.get(unit, 2),
        judged=judged and not primary,
        primary=primary,
    )
