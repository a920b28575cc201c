"""The numbers that a benchmark client wrote, as measures: which way is better, and which get a verdict.

Read by their names, not from a list of one release's: upstream calls everything ``mean_X_ms``, ``median_X_ms``,
``p99_X_ms`` and ``X_throughput`` (``vllm/benchmarks/serve.py``, ``vllm_omni/benchmarks/patch/patch.py``). What has no
known direction, counts and durations of audio, is no measure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omni_fastpath.config import unknown
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

_GROUPS: Mapping[str, str] = {
    "audio_ttfp": "first audio",
    "ttft": "first text",
    "e2el": "end to end",
    "tpot": "text after the first token",
    "itl": "text after the first token",
    "audio_rtf": "audio against real time",
    "audio_underrun_s": "audio against real time",
}
_THROUGHPUT = "throughput"
_OTHERS = "other"

_OF_REQUESTS = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(?P<stem>.+)")
_MEANT = ("_rtf", "_underrun_s")
"""Endings that say what is measured, and not only in which unit."""
_UNITS: Mapping[str, str] = {"_ms": "ms", "_mb": "MB", "_rtf": "", "_underrun_s": "s"}
_NONE_AT_ZERO = re.compile(
    r".*(?:ttft_ms|ttfp_ms|tpot_ms|itl_ms|e2el_ms|_generation_ms|step_latency_ms|_rtf|_peak_memory_mb)"
)
"""Of these upstream writes 0 where no request had any: neither a time nor a memory is zero."""
_OF_AUDIO = re.compile(r"audio_continuity_ok_rate|.*_audio_underrun_s")
"""Of these it writes what is best where there was no audio at all: nothing was late."""
_SHARES: Mapping[str, str] = {"rtfx": "throughput", "audio_continuity_ok_rate": "audio against real time"}
_THROUGHPUTS: Mapping[str, str] = {
    "request_throughput": "req/s",
    "request_goodput": "req/s",
    "output_throughput": "tok/s",
    "total_token_throughput": "tok/s",
    "max_output_tokens_per_s": "tok/s",
    "input_sequence_throughput": "seq/s",
    "audio_throughput": "s/s",
    "video_throughput": "s/s",
    "image_throughput": "img/s",
}


class AStart(Protocol):
    """What a measure reads."""

    @property
    def arm(self) -> str:
        """Its arm."""

    @property
    def measured(self) -> Mapping[str, float]:
        """Its numbers by key."""


def read(result: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a client's result that has a known direction, by its key."""
    found = {key: float(value) for key, value in result.items() if _is_number(value) and known(key) is not None}
    # The same number under two names would be judged twice.
    twice = {key for key in found if key.startswith("p50_") and f"median_{key.removeprefix('p50_')}" in found}
    return measured({key: value for key, value in found.items() if key not in twice})


def measured(found: Mapping[str, float]) -> dict[str, float]:
    """Those of the numbers that were measured: without the zeros by which upstream says that there was nothing."""
    silent = found.get("audio_throughput") == 0
    return {
        key: value
        for key, value in found.items()
        if not (value == 0 and _NONE_AT_ZERO.fullmatch(key)) and not (silent and _OF_AUDIO.fullmatch(key))
    }


@dataclass(frozen=True)
class Lack:
    """Measures that some starts have and others have not.

    Attributes:
        names: Of the measures.
        without: How many starts of each arm have none of them.
        starts: How many each arm has.
    """

    names: tuple[str, ...]
    without: tuple[int, int]
    starts: tuple[int, int]

    @property
    def is_worse(self) -> bool:
        """Whether a larger share of the second arm's starts is without."""
        (a, b), (all_a, all_b) = self.without, self.starts
        return b * all_a > a * all_b

    def told(self, arms: tuple[str, str]) -> str:
        """In words."""
        (a, b), (all_a, all_b) = self.without, self.starts
        return f"{a} of {all_a} starts of {arms[0]} and {b} of {all_b} of {arms[1]} have no {', '.join(self.names)}"


def lacks(starts: Sequence[AStart], arms: tuple[str, str]) -> list[Lack]:
    """What upstream always writes and some starts have no value of, by how many: an arm that answers without audio."""
    of = [[start for start in starts if start.arm == arm] for arm in arms]
    found: dict[tuple[int, int], list[str]] = {}
    for key in dict.fromkeys(key for start in starts for key in start.measured if _NONE_AT_ZERO.fullmatch(key)):
        a, b = (sum(key not in start.measured for start in each) for each in of)
        if a or b:
            found.setdefault((a, b), []).append(key)
    return [Lack(tuple(keys), without, (len(of[0]), len(of[1]))) for without, keys in found.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def known(key: str) -> tuple[str, str, str, Better] | None:
    """Group, name, unit and direction of a key; None where the direction is not known."""
    if key in _THROUGHPUTS or key.endswith(("_throughput", "_goodput")):
        return _THROUGHPUT, key, _THROUGHPUTS.get(key, "1/s"), "higher"
    if key in _SHARES:
        return _SHARES[key], key, "", "higher"
    match = _OF_REQUESTS.fullmatch(key)
    for suffix, unit in _UNITS.items():
        if match is not None and match["stem"].endswith(suffix):
            short = suffix if suffix in _MEANT else ""
            stem = match["stem"].removesuffix(suffix) + short
            return _GROUPS.get(stem, _OTHERS), key.removesuffix(suffix) + short, unit, "lower"
    return None


def table(starts: Sequence[AStart], *, primary: str | None = None, judged: Sequence[str] = ()) -> list[Measure]:
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
    order = [*dict.fromkeys(_GROUPS.values()), _THROUGHPUT, _OTHERS]
    rows = [_measure(key, primary=key == first, judged=key in others) for key in keys]
    return sorted(rows, key=lambda row: order.index(row.group))


def _measure(key: str, *, primary: bool, judged: bool) -> Measure:
    described = known(key)
    assert described is not None, "read leaves out what has no direction"
    group, name, unit, better = described
    digits = {"ms": 1, "": 3, "s": 3}.get(unit, 2)
    return Measure(
        group,
        name,
        unit,
        better,
        lambda start: start.measured.get(key, math.nan),
        digits,
        judged and not primary,
        primary,
    )
