"""The times of one request as plain numbers, and the waves that requests come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.rigs.playback import ran_dry_s, seconds_of
from omni_fastpath.tools.ab.capture import Capture

Wave = Literal["first", "later"]


@dataclass(frozen=True)
class Sample:
    """The times of one request of the capture client, seconds; None where there was none.

    Attributes:
        order: Position in which it was started.
        ttft: To the first text.
        ttfp: To the first audio packet.
        e2e: To the end of the answer.
        error: Why it failed; None when it was answered to its end.
        digest: Of everything in the answer that does not depend on time.
        gap: Longest time between two audio packets; None with fewer than two.
        dry: How long a listener heard nothing who played from the first packet on.
        audio_bytes: Samples that came back, in bytes.
    """

    order: int
    ttft: float | None
    ttfp: float | None
    e2e: float
    error: str | None
    digest: str
    audio_bytes: int
    gap: float | None = None
    dry: float | None = None


def sample(capture: Capture) -> Sample:
    """The times of a capture."""
    return Sample(
        order=capture.order,
        ttft=capture.ttft_s,
        ttfp=capture.ttfp_s,
        e2e=capture.e2e_s,
        error=None if capture.succeeded else str(capture.error or f"status {capture.status}"),
        digest=capture.digest(),
        audio_bytes=len(capture.audio),
        gap=max(capture.audio_gaps_s, default=None),
        dry=ran_dry_s([(event.at_s, seconds_of(event.audio)) for event in capture.audio_events]),
    )


def in_wave(samples: Sequence[Sample], wave: Wave, concurrency: int) -> list[Sample]:
    """The requests of a wave: blocks of ``concurrency`` in start order, the first one or all later ones."""
    ordered = sorted(samples, key=lambda sample: sample.order)
    return ordered[:concurrency] if wave == "first" else ordered[concurrency:]


def times(samples: Sequence[Sample], name: str) -> list[float]:
    """One time of every request that was answered to its end, seconds."""
    found = (getattr(sample, name) for sample in samples if sample.error is None)
    return [value for value in found if value is not None]
