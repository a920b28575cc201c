"""``benchmarks.server``: what it makes of a client's record, of a process's threads and of the engines' own words."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.rigs import playback
from benchmarks.server import figures, threads
from benchmarks.server.figures import Figure
from benchmarks.server.load import Load
from benchmarks.server.measure import kept_time
from omni_fastpath.tools.ab.capture import Capture, Piece, chat_request


def wav(seconds: float) -> bytes:
    """A packet as a chat stream sends it: a WAV file of its own."""
    return b"RIFF" + bytes(playback.HEADER_BYTES - 4 + int(seconds * playback.BYTES_A_SECOND))


def capture(started: float, audio: list[tuple[float, float]]) -> Capture:
    """A request whose packets came at these times and play so long."""
    found = Capture(chat_request("x"), started, status=200)
    found.pieces = [Piece(0.1, "a"), *(Piece(at_s, audio=wav(plays)) for at_s, plays in audio)]
    found.e2e_s = audio[-1][0]
    return found


def test_a_listener_hears_nothing_while_the_next_packet_is_late() -> None:
    """Played from the first packet on: what is late beyond what was played out; what is early is kept."""
    assert playback.ran_dry_s([]) == 0
    assert playback.ran_dry_s([(1.0, 0.3), (1.2, 0.3), (1.9, 1.0)]) == pytest.approx(0.3)
    assert playback.ran_dry_s([(1.0, 0.3), (1.1, 5.0), (2.0, 0.1)]) == 0


def test_figures_tell_the_first_wave_from_later_ones() -> None:
    """As many requests as streams are the first wave, by when they were sent."""
    captures = [
        capture(5.0, [(0.3, 1.0), (0.8, 1.0)]),
        capture(0.0, [(0.1, 1.0), (0.2, 1.0)]),
        capture(0.0, [(0.1, 1.0), (0.6, 1.0)]),
        capture(5.2, [(0.4, 1.0), (0.8, 1.0)]),
    ]
    cpu_s = {threads.FRONT_END: 0.4, threads.ORCHESTRATOR: 0.2, threads.SOCKETS: 0.0, threads.OTHERS: 0.2}
    found = figures.figures(captures, 2, cpu_s)
    others = {Figure.TTFP, Figure.TTFP_P99, Figure.GATED, Figure.CLIENT_MS}
    assert set(found) == set(Figure) - others
    assert found[Figure.FIRST_TTFP] == pytest.approx(100)
    assert found[Figure.LATER_TTFP] == pytest.approx(350)
    assert found[Figure.THROUGHPUT] == pytest.approx(4 / 6.0)
    assert found[Figure.GAP_P99] == pytest.approx(500, rel=0.01)
    assert found[Figure.FRONT_MS] == pytest.approx(100)
    assert found[Figure.PROCESS_A_SECOND] == pytest.approx(1000 * 0.8 / 8)
    assert not any(math.isnan(value) for value in found.values())
    assert figures.figures(captures, 0, cpu_s)[Figure.TTFP] == pytest.approx(200)
    whole = figures.figures(captures, 2, cpu_s, streamed=False)
    assert not {Figure.FIRST_TTFP, Figure.LATER_TTFP, Figure.GAP} & whole.keys()
    assert whole[Figure.E2E] == pytest.approx(700)


def test_threads_are_told_apart() -> None:
    """The first thread is the front end, ZeroMQ's are by name, the busiest other one is the orchestrator."""
    before = {7: {7: ("vllm", 10**9), 8: ("python", 0)}}
    after = {7: {7: ("vllm", 5 * 10**9), 8: ("python", 10**9), 9: ("ZMQbg/0", 3 * 10**9), 10: ("python", 2 * 10**9)}}
    found = threads.spent([7], before, after)
    assert found == {threads.FRONT_END: 4, threads.ORCHESTRATOR: 2, threads.SOCKETS: 3, threads.OTHERS: 1}
    _, nanoseconds = threads.used([os.getpid()])[os.getpid()][os.getpid()]
    assert nanoseconds > 0


def test_an_engines_last_words_are_read(tmp_path: Path) -> None:
    """What a light engine logs at its end is what the result line says of it."""
    from omni_simulated_device.light.host import LAST_WORDS

    line = LAST_WORDS % ("LightEngine_stage0_replica1", 211, 80.4, 0.11, 3.26, 20.72)
    wanted = {"steps": 211, "work_us": 80.0, "late_p50_ms": 0.11, "late_p99_ms": 3.26}
    (tmp_path / "log").write_text(f"(LightEngines pid=7) INFO {line}\n")
    assert kept_time(tmp_path / "log") == {"stage0_replica1": wanted}


def test_every_arm_gets_the_same_requests_at_the_same_times() -> None:
    """They follow from the level alone; those of an open loop keep its rate on average."""
    assert len({str(request.body) for request in Load().asked("16", 64)}) == 64
    crowd = Load(loop="open", requests=2000)
    assert crowd.starts_s(8) == crowd.starts_s(8) == sorted(crowd.starts_s(8))
    assert crowd.starts_s(8)[-1] == pytest.approx(250, rel=0.1)
    assert Load(loop="open", arrivals="even", requests=3).starts_s(4) == [0, 0.25, 0.5]


@pytest.mark.parametrize(("vary", "least", "most"), [(0.0, 100, 100), (0.5, 50, 150)])
def test_lengths_vary_evenly_and_alike_for_every_arm(vary: float, least: int, most: int) -> None:
    """Text tokens by request, codec frames by the simulated device; without ``vary`` all have one length."""
    asked = Load(vary=vary).asked("16", 500)
    lengths = [request.body["max_tokens"] for request in asked]
    assert asked == Load(vary=vary).asked("16", 500)
    assert (min(lengths), max(lengths)) == (least, most)
    stages = Load(model="qwen3_tts", api="speech", vary=vary).stages
    assert (stages["qwen3_tts"]["min_frames"], stages["qwen3_tts"]["max_frames"]) == (least, most)
