"""A request's summary, events and chunks of audio are upstream's own text and bytes."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest

from omni_fastpath.ledger import LEDGER
from tests.patches import chat_stream
from tests.patches.chat_stream import output, sound, token
from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

STATS = "vllm_omni.metrics.stats"
TEXTS = (
    " Hello",
    "",
    "世界",
    '"\\/\b\f\n\r\t\x00\x1f\x7f',
    "\u2028\ufeff\U0001f600",
    "\ue000text\ue001",
    "7310482956173849",
    " end",
)


@contextmanager
def switched_on(summary: str = "full") -> Iterator[dict[str, int]]:
    """The patch installed as in a process with upstream's API server; its counters."""
    importlib.import_module(chat_stream.SERVING)
    with only("lean_front_end", summary=summary) as entry:
        yield entry.counters


def needs_tables() -> None:
    """Skip where upstream itself logs one line per request."""
    from omni_fastpath.patches.lean_front_end import PATCH
    from tests.fakes.upstream import seams_here

    if not any("_format_table" in seam.path for seam in seams_here(PATCH)):
        pytest.skip("upstream itself logs one line per request on this release")


def _state() -> tuple[str, str]:
    entry = LEDGER.named("lean_front_end")
    return entry.state.value, entry.reason


# ---- The tables of a summary ----


@contextmanager
def logged() -> Iterator[list[str]]:
    """What vLLM's formatter makes of each record that upstream's statistics log meanwhile, in order."""
    from vllm.logging_utils import NewLineFormatter

    formatter = NewLineFormatter("%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s")
    handler, lines = logging.Handler(), list[str]()
    handler.emit = lambda record: lines.append(formatter.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger(STATS)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def aggregator(seed: int) -> Any:
    """A random aggregator with any number of stages, transfers and kinds of output, finished, failed or empty."""
    from vllm_omni.metrics.stats import OrchestratorAggregator, StageRequestStats, StageStats

    rng = random.Random(seed)
    stages = rng.randrange(1, 5)
    began = 1_700_000_000.0
    last = rng.choice((stages - 1, {"one": stages - 1}))
    named = {"stage_table_exclude": frozenset(rng.choice(((), ("serving_time_to_first_output_ms",))))}
    if "stage_table_exclude" not in inspect.signature(OrchestratorAggregator).parameters:  # up to 0.28
        named.clear()
    found = OrchestratorAggregator(stages, True, began, last, **named)
    one = f"chatcmpl-{rng.choice(('7', 'é漢', 'tab	bed', ''))}{seed}"
    numbers = (0, 0.0, 1, 7, 12345, 0.04, 3.14159, 1234567.891, -2.5)
    for stage in range(stages):
        if rng.random() < 0.2:
            continue
        for _ in range(rng.choice((1, 1, 1, 2))):
            stats = StageRequestStats(
                -1, 1, rng.choice((0, 23)), rng.choice((0, 1, 400)), 0.0, 0, 0.0, 0.0, StageStats()
            )
            for name, value in vars(stats).items():
                if type(value) in (int, float) and name not in ("batch_id", "batch_size"):
                    setattr(stats, name, type(value)(rng.choice(numbers)))
            stats.stage_id, stats.replica_id = stage, rng.choice((None, 0, 3))
            stats.output_unit_type = rng.choice((None, "token", "audio_frame", "образ", "a\tb", "two\nlines"))
            stats.vllm_itls_ms = rng.choice((None, [], [1.5], [float(n) for n in range(50)]))
            stats.inter_output_latencies_ms = rng.choice((None, [], [rng.random() for _ in range(9)], ["odd"]))
            stats.pipeline_timings = rng.choice((None, {}, {"preprocess_ms": 3.0, "ar2diffusion_ms": 1.0}))
            found.on_stage_metrics(stage, one, stats, rng.choice((None, "text", "audio", "image")))
            if rng.random() < 0.2:
                stats.diffusion_metrics = {"forward_time_s": 1.25, "image_num": 2.0}
        found.stage_first_ts[stage], found.stage_last_ts[stage] = began, began + rng.random()
        if stage and rng.random() < 0.7:
            found.on_forward(stage - 1, stage, one, rng.randrange(10**7), rng.random(), used_shm=True)
    if rng.random() < 0.7:
        found.on_finalize_request(stages - 1, one, began)
        found.e2e_events[0].e2e_total_ms = rng.random() * 10_000
        found.last_finish_ts = found.stage_last_ts[stages - 1] = began + 4.2
    return found


SEEDS = range(150)


def summaries() -> list[Any]:
    """What upstream returns for each seed, and logs meanwhile."""
    return [aggregator(seed).build_and_log_summary() for seed in SEEDS]


@pytest.fixture(scope="module")
def stock() -> tuple[list[Any], list[str]]:
    """What upstream returns and logs."""
    needs_tables()
    with logged() as lines:
        return summaries(), lines


def test_the_text_is_upstreams(stock: tuple[list[Any], list[str]]) -> None:
    """``full``: every log record of a random request's summary, their order and the result are stock's."""
    with switched_on() as counters, logged() as lines:
        results = summaries()
        assert _state()[0] == "applied"
        assert counters["tables"] > 2 * len(SEEDS)
    assert results == stock[0]
    assert lines == stock[1]


def _is_table(line: str) -> bool:
    return "[OmniTiming]" not in line


def test_a_line_is_upstreams_line(stock: tuple[list[Any], list[str]]) -> None:
    """``line``: only upstream's [OmniTiming] line of each request, and other records of that logger, are logged."""
    with switched_on("line") as counters, logged() as lines:
        results = summaries()
        assert counters["left_out"] == sum(map(_is_table, stock[1]))
        assert lines == [line for line in stock[1] if not _is_table(line)]
        logging.getLogger(STATS).warning("Failed to record audio generated frames")
        assert "Failed to record" in lines[-1]
    assert results == stock[0]


def test_what_line_leaves_out_is_logged_at_debug(stock: tuple[list[Any], list[str]]) -> None:
    """``line``: with DEBUG on, everything is logged in stock's order, and the tables at level DEBUG."""
    logging.getLogger(STATS).setLevel(logging.DEBUG)
    try:
        with switched_on("line") as counters, logged() as lines:
            summaries()
            assert counters["left_out"] == 0
    finally:
        logging.getLogger(STATS).setLevel(logging.NOTSET)
    # Every further line of a message begins with the first one's prefix, level included.
    assert [line.replace("DEBUG", "INFO") for line in lines] == stock[1]
    assert all(("DEBUG" in line) == _is_table(line) for line in lines)


def test_a_table_that_differs_is_upstreams(stock: tuple[list[Any], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first table of a number of columns differs from upstream's, all later text is upstream's."""
    from omni_fastpath.patches.lean_front_end.summary_table import SummaryTable

    with switched_on() as counters, logged() as lines:
        monkeypatch.setattr(SummaryTable, "get_string", lambda _: "ours")
        summaries()
        assert counters["tables"] == 0
        state, reason = _state()
    assert lines == stock[1]
    assert state == "failed"
    assert "is not as PrettyTable prints it" in reason


def test_a_process_without_the_api_server_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch does not import the API server; tables and files are lean without it, and the reason says so."""
    import soundfile  # type: ignore[import-untyped]

    monkeypatch.delitem(sys.modules, chat_stream.SERVING, raising=False)
    with only("lean_front_end") as entry:
        assert chat_stream.SERVING not in sys.modules
        assert "streamed answers are upstream's" in _state()[1]
        for _ in range(2):
            soundfile.write(BytesIO(), _samples(7), 24_000, format="WAV")
        assert entry.counters["files"] == 1
    monkeypatch.undo()
    with switched_on():
        assert "streamed answers" not in _state()[1]


# ---- Chunks of audio ----


def _samples(seed: int) -> Any:
    """Random floats of one channel: 16-bit levels and ties, all exponents, beyond the range, or no samples."""
    import numpy as np

    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 300))
    levels = rng.integers(-40_000, 40_000, count)
    kinds: list[Any] = [
        rng.standard_normal(count) * 10.0 ** rng.integers(-12, 3),
        levels / 32768,
        (levels + 0.5) / 32768,
        rng.integers(-(2**31), 2**31, count) / 2**31,
        np.nan_to_num(rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)),
    ]
    return kinds[seed % 5].astype(np.float32)


def test_files_are_soundfiles() -> None:
    """Every byte of WAV and 16-bit PCM is what soundfile writes, for random chunks through upstream's own function."""
    from vllm_omni.entrypoints.openai import audio_utils_mixin
    from vllm_omni.entrypoints.openai.protocol.audio import CreateAudio

    upstream_makes_pcm = hasattr(audio_utils_mixin, "_float32_to_pcm16_bytes")  # 0.32

    def make(seed: int) -> Any:
        form = ("wav", "pcm")[seed % 2]
        rate = (24_000, 44_100, 8_000)[seed % 3]
        audio = CreateAudio(audio_tensor=_samples(seed), sample_rate=rate, response_format=form, base64_encode=False)
        found = audio_utils_mixin.AudioMixin().create_audio(audio)
        return found.audio_data, found.media_type, getattr(found, "audio_metadata", None)

    expected = [make(seed) for seed in range(1000)]
    with switched_on() as counters:
        assert [make(seed) for seed in range(1000)] == expected
        assert _state()[0] == "applied", _state()
        # The first of each format is soundfile's own.
        assert counters["files"] == (499 if upstream_makes_pcm else 998)


def test_what_is_not_plain_is_soundfiles() -> None:
    """Two channels, other number types, infinite values, other formats and a used buffer are written by soundfile."""
    import numpy as np
    import soundfile

    mono = np.linspace(-1, 1, 64, dtype=np.float32)
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (np.stack([mono, mono], 1), 24_000, {"format": "WAV"}),
        (mono.astype(np.float64), 24_000, {"format": "WAV"}),
        ((mono * 9).astype(np.int16), 24_000, {"format": "WAV"}),
        (np.append(mono, np.float32("nan")), 24_000, {"format": "WAV"}),
        (np.append(mono, np.float32("inf")), 24_000, {"format": "WAV"}),
        (mono, 24_000, {"format": "FLAC"}),
        (mono, 24_000, {"format": "WAV", "subtype": "PCM_24"}),  # with floats the second of writing is in the file
        (mono, 24_000, {"format": "WAV", "endian": "BIG"}),
        (mono, 24_000, {"format": "WAV", "compression_level": 0.5}),
        (mono.tolist(), 24_000, {"format": "WAV"}),
        (mono, 24_000, {"format": "no such"}),
        (mono, -1, {"format": "WAV"}),
        (mono, 24_000, {"no_such": 1}),
    ]

    def write(data: Any, rate: int, named: dict[str, Any], before: bytes = b"") -> Any:
        file = BytesIO()
        file.write(before)
        try:
            soundfile.write(file, data, rate, **named)
        except Exception as error:
            return type(error), str(error).partition(" at 0x")[0]
        return file.getvalue()

    everything = [(*case, b"") for case in cases] + [(mono, 24_000, {"format": "WAV"}, b"in use")]
    expected = [write(*each) for each in everything]
    with switched_on() as counters:
        assert [write(*each) for each in everything] == expected
        assert counters["files"] == 0
        assert _state()[0] == "applied"


def test_a_file_that_differs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If libsndfile writes other bytes, the first file and all later ones are libsndfile's."""
    import soundfile

    def written() -> bytes:
        file = BytesIO()
        soundfile.write(file, _samples(7), 24_000, format="WAV")
        return file.getvalue()

    expected = written()
    with switched_on() as counters:
        from omni_fastpath.patches.lean_front_end import wrappers

        monkeypatch.setitem(wrappers._FORMS, ("WAV", None), lambda *_: b"RIFF")
        assert [written(), written()] == [expected, expected]
        assert _state()[0] == "failed"
        assert "not as soundfile writes it" in _state()[1]
        assert counters["files"] == 0


# ---- The events of a streamed answer ----


def _outputs(texts: Sequence[str] = TEXTS, *, indexes: Sequence[int] = (0,), **more: Any) -> list[Any]:
    """The outputs of one request: text with audio in between, and both ends."""
    found = []
    for number, text in enumerate(texts):
        found.append(output("text", [token(text, number, index=index) for index in indexes], **more))
        if number % 3 == 2:
            found.append(output("audio", [sound()]))
    found.append(output("text", [token("!", 99, index=index, finish="stop") for index in indexes], finished=True))
    found.append(output("audio", [sound(finish="stop")], finished=True))
    return found


@pytest.fixture(autouse=True)
def _one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the time of creation that events contain."""
    import time

    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.25)


METRICS = {"metrics": {"stage_metrics": {"0": {"x": 1.5}}}}
NAMES = {
    'a "model"': 8,
    "7310482956173849": 8,
    "模型": 8,
    "\ue000text\ue001": 0,  # marks the places of a form
}
CASES: list[Any] = [
    pytest.param(asked, given, named, lean, id=name)
    for name, asked, given, named, lean in (
        ("text and audio", {}, {}, {}, 8),
        ("no usage", {"stream_options": None}, {}, {}, 8),
        ("usage at the end", {"stream_options": {"include_usage": True}}, {}, {}, 8),
        ("text alone", {"modalities": ["text"]}, {}, {}, 8),
        ("two choices", {"n": 2}, {"indexes": (0, 1)}, {}, 16),
        ("token ids", {"return_token_ids": True}, {}, {}, 0),
        ("one tool call at a time", {"parallel_tool_calls": False}, {}, {}, 8),
        ("stage metrics kept back", {}, METRICS, {}, 8),
        ("stage metrics", {"return_stage_metrics": True}, METRICS, {}, 0),
        ("echo", {"echo": True}, {}, {}, 8),
        ("an id that is too long to be kept", {}, {}, {"one": "chatcmpl-".ljust(257, "x")}, 0),
        ("a long id", {}, {}, {"one": "chatcmpl-".ljust(256, "x")}, 8),
        *((f"{key} {name}", {}, {}, {key: name}, lean) for key in ("model", "one") for name, lean in NAMES.items()),
    )
]
"""What is asked, what the stages give, other names than the usual ones, and how many events the patch writes."""


@pytest.mark.parametrize(("asked", "given", "named", "lean"), CASES)
async def test_events_are_upstreams(asked: Any, given: Any, named: Any, lean: int) -> None:
    """Byte for byte, whatever the request asks for and whatever its names are, and so is the usage for the log."""
    request, outputs = chat_stream.request(**asked), _outputs(**given)
    expected = await chat_stream.events(request, outputs, **named)
    assert sum("Hello" in event for event in expected[0]) == max(1, len(given.get("indexes", (0,))))
    assert not any('"error"' in event for event in expected[0])
    with switched_on() as counters:
        found = await chat_stream.events(request, outputs, **named)
        assert found == expected
        assert found[1].model_fields_set == expected[1].model_fields_set
        assert repr(found[1]) == repr(expected[1])
        assert (counters["streams"], counters["events"]) == (1, lean)
        assert _state()[0] == "applied"


async def test_two_requests_of_one_id_do_not_mix() -> None:
    """Two requests with one id at the same time, of different models and with other options, get their own events."""
    requests = (chat_stream.request(), chat_stream.request(stream_options=None))
    alone = [await chat_stream.events(request, _outputs(), model=str(n)) for n, request in enumerate(requests)]
    with switched_on():
        together = await asyncio.gather(
            *(chat_stream.events(request, _outputs(), model=str(n)) for n, request in enumerate(requests))
        )
    assert together == alone


def test_every_character_is_escaped_as_pydantic_does() -> None:
    """Every Unicode character except surrogates, which are left to upstream."""
    from json.encoder import encode_basestring

    from pydantic_core import to_json

    for first in range(0, 0x110000, 0x800):
        if first == 0xD800:
            continue
        text = "".join(map(chr, range(first, first + 0x800)))
        assert encode_basestring(text) == to_json(text).decode()


async def test_a_lone_surrogate_is_upstreams_error() -> None:
    """A lone surrogate, which cannot be sent, ends the stream with upstream's error."""
    outputs = _outputs(("a", "\ud800", "b"))
    expected = await chat_stream.events(chat_stream.request(), outputs)
    assert any("surrogates" in event for event in expected[0])
    with switched_on() as counters:
        assert await chat_stream.events(chat_stream.request(), outputs) == expected
        assert counters["events"] == 1
        assert _state()[0] == "applied"


async def test_an_event_that_differs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first event of a form differs from upstream's, upstream's is sent and the state is failed."""
    from omni_fastpath.patches.lean_front_end import stream_events as events

    outputs = _outputs(("世界", "b"))
    expected = await chat_stream.events(chat_stream.request(), outputs)
    with switched_on():
        monkeypatch.setattr(events, "_filled_in", lambda *_: "{}")
        assert await chat_stream.events(chat_stream.request(), outputs) == expected
        state, reason = _state()  # with a remark behind it where a part of the patch has nothing to do
        assert state == "failed"
        assert reason.startswith("writing an event failed: ValueError('an event is not as pydantic writes it')")
