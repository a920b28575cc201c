"""``benchmarks.server``: what it makes of threads and of the engines' own words, and what requests bring."""

from __future__ import annotations

import base64
import io
import os
import threading
from pathlib import Path

import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.server import threads
from benchmarks.server.audio_in import FILES, AudioIn, brings_audio
from benchmarks.server.figures import Figure, figures
from benchmarks.server.load import Load
from benchmarks.server.measure import judged, kept_time
from omni_fastpath.tools.ab import verdict
from omni_fastpath.tools.ab.capture import Capture, Piece, chat_request
from omni_simulated_device import depths


def test_threads_of_several_processes_are_summed() -> None:
    """As read from the kernel, which has counted this process's first thread."""
    known = {7: {"front_end": 7, "orchestrator": 10}, 9: {"front_end": 9, "orchestrator": 0}}
    after = {7: {7: 4.0, 8: 1.0, 10: 2.0}, 9: {9: 0.5}}
    assert threads.spent(known, {7: {10: 0.5}, 9: {}}, after) == {
        "front_end": 4.5,
        "orchestrator": 1.5,
        "others": 1.0,
    }
    assert threads.used([os.getpid()])[os.getpid()][os.getpid()] > 0


def test_stocks_orchestrator_is_the_busiest_thread_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the first and ZMQ's own; a state file that names it is believed."""
    monkeypatch.setattr(threads, "_is_zmqs", lambda _pid, thread: thread == 11)
    before, after = {7: {8: 9.0}}, {7: {7: 9.0, 8: 9.5, 10: 2.0, 11: 4.0}}
    assert threads.known(before, after, {7: {"front_end": 7}}) == {7: {"front_end": 7, "orchestrator": 10}}
    assert threads.known(before, after, {7: {"orchestrator": 8}}) == {7: {"front_end": 7, "orchestrator": 8}}


@pytest.mark.parametrize("kind", FILES)
def test_each_so_many_requests_bring_a_recording(kind: AudioIn) -> None:
    """The same at every start, none like another; what the others wait for is told by itself."""
    soundfile = pytest.importorskip("soundfile")
    form, seconds, rate, channels = FILES[kind]
    if form.upper() not in soundfile.available_formats():
        pytest.skip(f"this libsndfile has no {form}")
    load = Load(audio_in=kind, audio_every=3)
    requests = load.asked("a level", 4)
    assert load.asked("a level", 4) == requests
    assert [brings_audio(request) for request in requests] == [True, False, False, True]
    parts = [requests[number].body["messages"][0]["content"] for number in (0, 3)]
    sent = [audio["input_audio"]["data"] for audio, _ in parts]
    assert sent[0] != sent[1]
    assert parts[0][1] == {"type": "text", "text": "Question 0 of a level"}
    file = soundfile.info(io.BytesIO(base64.b64decode(sent[0])))
    assert (file.frames, file.samplerate, file.channels) == (seconds * rate, rate, channels)
    captures = [
        Capture(request, float(number), pieces=[Piece((number + 1.0) ** 2, audio=b"..")], e2e_s=9.0)
        for number, request in enumerate(requests)
    ]
    found = figures(captures, 0, {"front_end": 0.0, "orchestrator": 0.0})
    assert (found[Figure.TTFP], found[Figure.BROUGHT_TTFP], found[Figure.THROUGHPUT]) == (6500.0, 8500.0, 4 / 12)


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


async def test_messages_for_the_front_end_are_counted(tmp_path: Path) -> None:
    """The engine is found by its orchestrator's thread, and what was seen by when."""
    janus = pytest.importorskip("janus")
    leave = threading.Event()

    class Engine:
        def __init__(self) -> None:
            self.output_queue = janus.Queue()
            self.output_queue.sync_q.put_nowait("a message")

        def run(self) -> None:
            leave.wait(60)

    engine = Engine()
    thread = threading.Thread(target=engine.run, name="orchestrator")
    thread.start()
    try:
        assert depths.depth(depths.engine()) == 1
    finally:
        leave.set()
        thread.join()
    assert depths.engine() is None
    (tmp_path / "depths").write_text("7 1.000 5\n7 2.000 6\n9 3.000 7\n")
    assert depths.read(tmp_path / "depths", 1.5, 3.0) == [6, 7]


def test_an_engines_last_words_are_read(tmp_path: Path) -> None:
    """What a light engine logs at its end is what the result line says of it."""
    from omni_simulated_device.light.host import LAST_WORDS

    line = LAST_WORDS % ("LightEngine_stage0_replica1", 211, 80.4, 0.11, 3.26, 20.72)
    wanted = {"steps": 211, "work_us": 80.0, "late_p50_ms": 0.11, "late_p99_ms": 3.26}
    (tmp_path / "log").write_text(f"(LightEngines pid=7) INFO {line}\n")
    assert kept_time(tmp_path / "log") == {"stage0_replica1": wanted}
