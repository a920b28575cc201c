"""From what the client recorded to the figures of one level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum

from benchmarks.ab.capture import Capture
from benchmarks.ab.verdict import Better
from benchmarks.rigs.captures import audio_gaps_s, quantile, text_gaps_s, ttfp_s, ttft_s

BYTES_A_SECOND = 24_000 * 2
HEADER_BYTES = 44


class Figure(StrEnum):
    """Name and unit of each, in the order of the table; NaN where a load has none."""

    TEXT = "first text p50, ms"
    TEXT_P99 = "first text p99, ms"
    AUDIO = "first audio p50, ms"
    AUDIO_P99 = "first audio p99, ms"
    DRY = "underrun p50, ms"
    """The time without audio for a listener who plays from the first packet on."""
    DRY_P99 = "underrun p99, ms"
    GAP = "largest gap p50, ms"
    """Of a request, between two pieces of audio."""
    TEXT_GAP_P99 = "largest text gap p99, ms"
    E2E = "end to end p50, ms"
    RTF = "real-time factor p50"
    """When the last audio came, over how long all of it plays."""
    RATE = "requests per second"
    PROCESS_MS = "API process, CPU ms/request"
    """Of all its threads, and of all API processes."""
    MEMORY = "API process, MiB"
    """Resident at the end of the level, of all API processes."""
    ENGINES_LATE = "light engines late p99, ms"
    """Of the worst one: the instrument's own, as the next two."""
    CLIENT_LATE = "client late p99, ms"
    CLIENT = "client, cores"


def better(name: str) -> Better:
    """Which way a figure is better."""
    return "higher" if name == Figure.RATE else "lower"


INSTRUMENT = (Figure.ENGINES_LATE, Figure.CLIENT_LATE, Figure.CLIENT)


def figures(captures: Sequence[Capture], cpu_s: float = math.nan) -> dict[str, float]:
    """Of one level: those of `Figure` that client and kernel tell.

    Args:
        captures: Of all requests.
        cpu_s: Processor seconds of the API processes meanwhile.
    """
    begun = min(capture.started_at_s for capture in captures)
    ended = max(capture.started_at_s + capture.e2e_s for capture in captures)
    text, audio = _known(map(ttft_s, captures)), _known(map(ttfp_s, captures))
    packets = [[(event.at_s, _seconds_of(event.audio)) for event in capture.audio_pieces] for capture in captures]
    dry = [_ran_dry_s(each) for each in packets if each]
    gaps, text_gaps = (
        [max(gaps) for capture in captures if (gaps := gaps_of(capture))] for gaps_of in (audio_gaps_s, text_gaps_s)
    )
    return {
        Figure.TEXT: 1000 * quantile(text, 0.5),
        Figure.TEXT_P99: 1000 * quantile(text, 0.99),
        Figure.AUDIO: 1000 * quantile(audio, 0.5),
        Figure.AUDIO_P99: 1000 * quantile(audio, 0.99),
        Figure.DRY: 1000 * quantile(dry, 0.5),
        Figure.DRY_P99: 1000 * quantile(dry, 0.99),
        Figure.GAP: 1000 * quantile(gaps, 0.5),
        Figure.TEXT_GAP_P99: 1000 * quantile(text_gaps, 0.99),
        Figure.E2E: 1000 * quantile((capture.e2e_s for capture in captures), 0.5),
        Figure.RTF: quantile((each[-1][0] / sum(plays for _, plays in each) for each in packets if each), 0.5),
        Figure.RATE: len(captures) / (ended - begun),
        Figure.PROCESS_MS: 1000 * cpu_s / len(captures),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _seconds_of(audio: bytes) -> float:
    """How long a packet plays: of a chat stream a WAV file of its own, of speech raw PCM."""
    header = HEADER_BYTES if audio[:4] == b"RIFF" else 0
    return max(0, len(audio) - header) / BYTES_A_SECOND


def _ran_dry_s(packets: Sequence[tuple[float, float]]) -> float:
    """How long a listener heard nothing who plays from the first packet on.

    Args:
        packets: When each came and how long it plays, seconds.
    """
    ends, silent = packets[0][0], 0.0
    for came, plays in packets:
        silent += max(0.0, came - ends)
        ends = max(ends, came) + plays
    return silent
