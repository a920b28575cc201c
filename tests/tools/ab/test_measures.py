"""The numbers of a client's result as measures."""

from __future__ import annotations

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.tools.ab import measures
from omni_fastpath.tools.ab.files import Start

MEASURES = {
    "request_throughput": 2.0,
    "audio_throughput": 3.0,
    "image_throughput": 0.0,
    "median_ttft_ms": 100.0,
    "p99.9_ttft_ms": 180.0,
    "mean_audio_rtf": 0.2,
    "median_audio_underrun_s": 0.1,
    "audio_continuity_ok_rate": 1.0,
}


def test_every_measure_is_read() -> None:
    """Audio durations, counts, memory, standard deviations and values that are no number are no measures."""
    counts = {"duration": 4.0, "completed": 8, "failed": 1, "request_goodput": None, "p90_e2el_ms": float("nan")}
    others = {"std_ttft_ms": 9.0, "median_audio_duration_s": 2.0, "mean_peak_memory_mb": 900.0}
    nested = {"percentiles_video_rtf": [[50.0, 0.4], [99.0, 0.6]]}
    assert measures.read({**MEASURES, **counts, **others, **nested}) == MEASURES


def test_a_zero_that_means_none_is_no_value() -> None:
    """A time of zero means that there is no value, but throughput and underrun can be zero."""
    may_be = {"request_throughput": 2.0, "audio_throughput": 0.0, "median_audio_underrun_s": 0.0}
    never = ("median_ttft_ms", "p99_audio_ttfp_ms", "median_audio_rtf", "mean_itl_ms", "mean_image_generation_ms")
    assert measures.read({**may_be, **dict.fromkeys(never, 0.0)}) == may_be


def _starts(**measured: float) -> list[Start]:
    return [Start(arm="A", measured=measured)]


def test_the_primary_measure_may_be_named() -> None:
    """It is named by key or title, and one that was not measured is refused with the nearest key."""
    measured = {"request_throughput": 1.0, "median_ttft_ms": 1.0, "p99.9_ttft_ms": 1.0, "image_throughput": 0.0}
    for primary in ("p99.9_ttft_ms", "first text (TTFT), p99.9"):
        rows = measures.table(_starts(**measured), primary=primary)
        assert [(row.title, row.primary) for row in rows] == [
            ("first text (TTFT), median", False),
            ("first text (TTFT), p99.9", True),
            ("requests served", False),
        ]
        assert [row.judged for row in rows] == [not row.primary for row in rows]
        measures.check_primary(primary, _starts(**measured))
    with pytest.raises(ConfigError, match=r"median_ttft, which was not measured.*did you mean 'median_ttft_ms'"):
        measures.check_primary("median_ttft", _starts(**measured))


def test_no_silence_is_shown_where_there_was_audio() -> None:
    """An underrun of zero in every start is shown if there was audio, and left out otherwise."""
    silence = {"p99_audio_underrun_s": 0.0}
    rows = measures.table(_starts(**silence, median_audio_ttfp_ms=1.0))
    assert [(row.title, row.judged) for row in rows][-1] == ("silence (underrun), p99", True)
    assert measures.table(_starts(**silence)) == []


def test_what_a_listener_hears_is_judged_before_what_the_load_decides() -> None:
    """Underrun has a verdict, but not the text throughput, which follows from the request rate."""
    rows = measures.table(_starts(**dict.fromkeys(measures.JUDGED, 1.0)))
    judged = [row.title for row in rows if row.judged or row.primary]
    assert len(judged) == 1 + measures.OTHERS
    assert "silence (underrun), p99" in judged
    assert "text made" not in judged
