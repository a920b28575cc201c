"""What a listener has of audio packets: how long each plays, and for how long nothing was there to be played."""

from __future__ import annotations

from collections.abc import Sequence

BYTES_A_SECOND = 24_000 * 2
HEADER_BYTES = 44


def seconds_of(audio: bytes) -> float:
    """How long a packet plays: of a chat stream a WAV file of its own, of speech raw PCM."""
    header = HEADER_BYTES if audio[:4] == b"RIFF" else 0
    return max(0, len(audio) - header) / BYTES_A_SECOND


def ran_dry_s(packets: Sequence[tuple[float, float]]) -> float:
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
