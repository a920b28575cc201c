"""The figures of ``benchmarks.server``, and the rows that it judges."""

from __future__ import annotations

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Load
from benchmarks.server.measure import judged
from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.capture import Capture, Piece, chat_request


@pytest.mark.parametrize(
    "load", [Load((8, 128)), Load((4,), loop="open"), Load((64,), model="qwen3_tts", api="speech")]
)
def test_each_level_has_its_own_rows_for_verdicts(load: Load) -> None:
    """First audio is the primary one, and six starts can tell a difference in each of them."""
    families = judged(load)
    assert [{level for level, _ in rows} for rows in families] == [{f"{level:g}"} for level in load.levels]
    for rows in families:
        assert next(iter(rows))[1] in (Figure.LATER_TTFP, Figure.TTFP)
        assert verdict.starts_for(len(rows) - 1) <= verdict.STARTS


def test_pauses_in_text_and_in_audio_are_told_apart() -> None:
    """Each of its own pieces, whatever comes in between."""
    pieces = [Piece(1.0, "a"), Piece(1.5, audio=b".."), Piece(4.0, "b"), Piece(4.5, audio=b"..")]
    capture = Capture(chat_request("Hello"), 0.0, pieces=pieces, e2e_s=5.0)
    found = figures([capture], 1, {"front_end": 0.1, "orchestrator": 0.2, "others": 0.3})
    assert (found[Figure.GAP], found[Figure.TEXT_GAP_P99], round(found[Figure.PROCESS_MS])) == (3000.0, 3000.0, 600)
