"""From what the client recorded to the figures of one level."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from benchmarks.rigs.captures import audio_gaps_s, text_gaps_s, ttfp_s, ttft_s
from benchmarks.rigs.quantiles import quantile
from benchmarks.server.audio_in import brings_audio
from omni_fastpath.threads import FRONT_END, ORCHESTRATOR
from omni_fastpath.tools.ab.capture import Capture

BYTES_A_SECOND = 24_000 * 2
HEADER_BYTES = 44


class Figure(StrEnum):
    """Name and unit of each, in the order of the table; a load has those that it can have.

    Where requests bring audio, first pieces and gaps are of those that bring none.
    """

    THROUGHPUT = "throughput, req/s"
    FIRST_TTFP = "TTFP first wave p50, ms"
    FIRST_TTFP_P99 = "TTFP first wave p99, ms"
    LATER_TTFP = "TTFP later waves p50, ms"
    LATER_TTFP_P99 = "TTFP later waves p99, ms"
    TTFP = "TTFP p50, ms"
    TTFP_P99 = "TTFP p99, ms"
    BROUGHT_TTFP = "TTFP of those that bring audio p50, ms"
    FIRST_TEXT = "first text p50, ms"
    FIRST_TEXT_P99 = "first text p99, ms"
    E2E = "end to end p50, ms"
    E2E_P99 = "end to end p99, ms"
    GAP = "largest gap p50, ms"
    GAP_P99 = "largest gap p99, ms"
    DRY = "audio ran dry p99, ms"
    TEXT_GAP = "largest text gap p50, ms"
    TEXT_GAP_P99 = "largest text gap p99, ms"
    QUEUED = "queued for the front end mean, messages"
    """Between the orchestrator's thread and the front end's, looked at twenty times a second."""
    QUEUED_MOST = "queued for the front end at most, messages"
    FRONT_MS = "front end, CPU ms/request"
    ORCHESTRATOR_MS = "orchestrator, CPU ms/request"
    PROCESS_MS = "API process, CPU ms/request"
    """Of all its threads."""
    PROCESS_A_SECOND = "API process, CPU ms/s of audio"
    CLIENT_MS = "client, CPU ms/request"
    """The instrument's own: it has the same processors."""


def figures(
    captures: Sequence[Capture], first_wave: int, cpu_s: Mapping[str, float], *, streamed: bool = True
) -> dict[str, float]:
    """Of one level: those of `Figure` that client and kernel tell; NaN where there is nothing to count.

    Args:
        captures: Of all requests.
        first_wave: How many of them, the first to be sent, started at once; 0 where there are no waves.
        cpu_s: Processor seconds of the API processes' threads meanwhile.
        streamed: Answers came piece by piece; else first pieces and gaps are no figures.
    """
    begun = min(capture.started_at_s for capture in captures)
    ended = max(capture.started_at_s + capture.e2e_s for capture in captures)
    audio_s = sum(_seconds_of(event.audio) for capture in captures for event in capture.audio_pieces)
    found: dict[str, float] = {Figure.THROUGHPUT: len(captures) / (ended - begun)}
    if streamed:
        found |= _pieces(sorted(captures, key=lambda capture: capture.started_at_s), first_wave)
    return found | {
        Figure.E2E: _ms(captures, _e2e_s, 0.5),
        Figure.E2E_P99: _ms(captures, _e2e_s, 0.99),
        Figure.FRONT_MS: 1000 * cpu_s[FRONT_END] / len(captures),
        Figure.ORCHESTRATOR_MS: 1000 * cpu_s[ORCHESTRATOR] / len(captures),
        Figure.PROCESS_MS: 1000 * sum(cpu_s.values()) / len(captures),
        Figure.PROCESS_A_SECOND: 1000 * sum(cpu_s.values()) / audio_s if audio_s else math.nan,
    }


def by_request(captures: Sequence[Capture]) -> list[dict[str, float | None]]:
    """Each request in the order of starting: when it did since the first one, and its times since then, seconds."""
    ordered = sorted(captures, key=lambda capture: capture.started_at_s)
    return [
        {
            "started_s": capture.started_at_s - ordered[0].started_at_s,
            "first_text_s": ttft_s(capture),
            "first_audio_s": ttfp_s(capture),
            "ended_s": capture.e2e_s,
            "largest_gap_s": max(audio_gaps_s(capture), default=None),
        }
        for capture in ordered
    ]


def _pieces(captures: Sequence[Capture], first_wave: int) -> dict[str, float]:
    """Figures of answers that came piece by piece, in the order of starting."""
    bring = [capture for capture in captures if brings_audio(capture.request)]
    first, later = (_bring_none(part) for part in (captures[:first_wave], captures[first_wave:]))
    captures = _bring_none(captures)
    half, most = (Figure.LATER_TTFP, Figure.LATER_TTFP_P99) if first_wave else (Figure.TTFP, Figure.TTFP_P99)
    gaps, text_gaps = (
        [max(gaps) for capture in captures if (gaps := gaps_of(capture))] for gaps_of in (audio_gaps_s, text_gaps_s)
    )
    dry = [_ran_dry_s([(event.at_s, _seconds_of(event.audio)) for event in each.audio_pieces]) for each in captures]
    return {
        Figure.FIRST_TTFP: _ms(first, ttfp_s, 0.5),
        Figure.FIRST_TTFP_P99: _ms(first, ttfp_s, 0.99),
        half: _ms(later, ttfp_s, 0.5),
        most: _ms(later, ttfp_s, 0.99),
        Figure.BROUGHT_TTFP: _ms(bring, ttfp_s, 0.5),
        Figure.FIRST_TEXT: _ms(captures, ttft_s, 0.5),
        Figure.FIRST_TEXT_P99: _ms(captures, ttft_s, 0.99),
        Figure.GAP: 1000 * quantile(gaps, 0.5),
        Figure.GAP_P99: 1000 * quantile(gaps, 0.99),
        Figure.DRY: 1000 * quantile(dry, 0.99),
        Figure.TEXT_GAP: 1000 * quantile(text_gaps, 0.5),
        Figure.TEXT_GAP_P99: 1000 * quantile(text_gaps, 0.99),
    }


def _bring_none(captures: Sequence[Capture]) -> Sequence[Capture]:
    """Those of the requests without audio, unless each brings some."""
    return [capture for capture in captures if not brings_audio(capture.request)] or captures


def _seconds_of(audio: bytes) -> float:
    """How long a packet plays: of a chat stream a WAV file of its own, of speech raw PCM."""
    header = HEADER_BYTES if audio[:4] == b"RIFF" else 0
    return max(0, len(audio) - header) / BYTES_A_SECOND


def _ran_dry_s(packets: Sequence[tuple[float, float]]) -> float:
    """How long a listener heard nothing who plays from the first packet on.

    Args:
        packets: When each came and how long it plays, seconds.
    """
    if not packets:
        return 0.0
    ends, silent = packets[0][0], 0.0
    for came, plays in packets:
        silent += max(0.0, came - ends)
        ends = max(ends, came) + plays
    return silent


def _e2e_s(capture: Capture) -> float:
    return capture.e2e_s


def _ms(captures: Sequence[Capture], time_of: Callable[[Capture], float | None], share: float) -> float:
    times = [value for capture in captures if (value := time_of(capture)) is not None]
    return 1000 * quantile(times, share)
