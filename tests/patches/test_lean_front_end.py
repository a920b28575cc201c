"""A request's summary and chunks of audio are upstream's own text and bytes."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

import numpy as np
import soundfile  # type: ignore[import-untyped]

from omni_fastpath.patches.lean_front_end import PATCH
from tests.fakes.upstream import seams_here
from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

STATS = "vllm_omni.metrics.stats"

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
    found = OrchestratorAggregator(stages, True, began, rng.choice((stages - 1, {"one": stages - 1})))
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
    if not any("_format_table" in seam.path for seam in seams_here(PATCH)):
        pytest.skip("upstream itself logs one line per request on this release")
    with logged() as lines:
        return summaries(), lines


def test_the_text_is_upstreams(stock: tuple[list[Any], list[str]]) -> None:
    """``full``: every log record of a random request's summary, their order and the result are stock's."""
    with only("lean_front_end", summary="full") as entry, logged() as lines:
        results = summaries()
        assert not entry.has_failed
        assert entry.counters["tables"] > 2 * len(SEEDS)
    assert results == stock[0]
    assert lines == stock[1]


def _is_table(line: str) -> bool:
    return "[OmniTiming]" not in line


def test_a_line_is_upstreams_line(stock: tuple[list[Any], list[str]]) -> None:
    """``line``: only upstream's [OmniTiming] line of each request, and other records of that logger, are logged."""
    with only("lean_front_end", summary="line") as entry, logged() as lines:
        results = summaries()
        assert entry.counters["left_out"] == sum(map(_is_table, stock[1]))
        assert lines == [line for line in stock[1] if not _is_table(line)]
        logging.getLogger(STATS).warning("Failed to record audio generated frames")
        assert "Failed to record" in lines[-1]
    assert results == stock[0]


def test_what_line_leaves_out_is_logged_at_debug(stock: tuple[list[Any], list[str]]) -> None:
    """``line``: with DEBUG on, everything is logged in stock's order, and the tables at level DEBUG."""
    logging.getLogger(STATS).setLevel(logging.DEBUG)
    try:
        with only("lean_front_end", summary="line") as entry, logged() as lines:
            summaries()
            assert entry.counters["left_out"] == 0
    finally:
        logging.getLogger(STATS).setLevel(logging.NOTSET)
    # Every further line of a message begins with the first one's prefix, level included.
    assert [line.replace("DEBUG", "INFO") for line in lines] == stock[1]
    assert all(("DEBUG" in line) == _is_table(line) for line in lines)


def test_a_table_that_differs_is_upstreams(stock: tuple[list[Any], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first table of a number of columns differs from upstream's, all later text is upstream's."""
    from omni_fastpath.patches.lean_front_end.summary_table import SummaryTable

    with only("lean_front_end", summary="full") as entry, logged() as lines:
        monkeypatch.setattr(SummaryTable, "get_string", lambda _: "ours")
        summaries()
        assert entry.counters["tables"] == 0
        assert entry.has_failed
        assert "is not as PrettyTable prints it" in entry.reason
    assert lines == stock[1]


# ---- Chunks of audio ----


def _samples(seed: int) -> Any:
    """Random floats of one channel: 16-bit levels and ties, all exponents, beyond the range, or no samples."""
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
    with only("lean_front_end", summary="full") as entry:
        assert [make(seed) for seed in range(1000)] == expected
        assert not entry.has_failed, entry.reason
        # The first of each format is soundfile's own.
        assert entry.counters["files"] == (499 if upstream_makes_pcm else 998)


def test_what_is_not_plain_is_soundfiles() -> None:
    """Two channels, other number types, infinite values, other formats and a used buffer are written by soundfile."""
    mono = np.linspace(-1, 1, 64, dtype=np.float32)
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (np.stack([mono, mono], 1), 24_000, {"format": "WAV"}),
        (mono.astype(np.float64), 24_000, {"format": "WAV"}),
        (np.append(mono, np.float32("nan")), 24_000, {"format": "WAV"}),
        (mono, 24_000, {"format": "FLAC"}),
        (mono, 24_000, {"format": "WAV", "subtype": "PCM_24"}),  # with floats the second of writing is in the file
        (mono, 24_000, {"format": "WAV", "endian": "BIG"}),
        (mono.tolist(), 24_000, {"format": "WAV"}),
        (mono, -1, {"format": "WAV"}),
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
    with only("lean_front_end", summary="full") as entry:
        assert [write(*each) for each in everything] == expected
        assert entry.counters["files"] == 0
        assert not entry.has_failed


def test_a_file_that_differs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If libsndfile writes other bytes, the first file and all later ones are libsndfile's."""

    def written() -> bytes:
        file = BytesIO()
        soundfile.write(file, _samples(7), 24_000, format="WAV")
        return file.getvalue()

    expected = written()
    with only("lean_front_end", summary="full") as entry:
        from omni_fastpath.patches.lean_front_end import wrappers

        monkeypatch.setitem(wrappers._FORMS, ("WAV", None), lambda *_: b"RIFF")
        assert [written(), written()] == [expected, expected]
        assert entry.has_failed
        assert "not as soundfile writes it" in entry.reason
        assert entry.counters["files"] == 0
