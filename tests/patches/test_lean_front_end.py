"""The end of a request: upstream's own summary, its log records, and what the front end does besides."""

from __future__ import annotations

import inspect
import logging
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

MODES = ("full", "thread", "line", "interval")
STATS = "vllm_omni.metrics.stats"


class _Log(logging.Handler):
    """Keeps records, and what vLLM's formatter makes of them, in the order in which they were written."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.logging_utils import NewLineFormatter

        self.setFormatter(NewLineFormatter("%(levelname)s [%(fileinfo)s:%(lineno)d] %(message)s"))
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []
        self.threads: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        self.records.append(record)
        self.threads.append(threading.current_thread().name)

    def clear(self) -> None:
        """Forget what was written so far."""
        for each in (self.lines, self.records, self.threads):
            each.clear()

    def of_upstream(self) -> list[str]:
        """The lines of upstream's statistics."""
        return [line for line, record in zip(self.lines, self.records, strict=True) if record.name == STATS]

    def of_ours(self) -> list[str]:
        """The lines of omni-fastpath."""
        names = [record.name for record in self.records]
        return [line for line, name in zip(self.lines, names, strict=True) if name == "vllm.omni_fastpath"]


@pytest.fixture(autouse=True)
def _levels_of_handlers() -> Iterator[None]:
    """A library below the API server sets the level of all handlers of the root when it is imported, pytest's too."""
    levels = [(handler, handler.level) for handler in logging.getLogger().handlers]
    yield
    for handler, level in levels:
        handler.setLevel(level)


@pytest.fixture
def log() -> Iterator[_Log]:
    """What vLLM's loggers write."""
    handler, root = _Log(), logging.getLogger("vllm")
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)


@contextmanager
def switched_on(**values: Any) -> Iterator[dict[str, int]]:
    """The patch installed with these values; its counters. Skips what is about a summary where upstream's is a line."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, seams_here, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.patches.lean_front_end import PATCH

    if "summary" in values and not any("build_and_log_summary" in seam.path for seam in seams_here(PATCH)):
        pytest.skip("upstream itself logs one line a request on this release")
    name = "OMNI_FASTPATH_LEAN_FRONT_END"
    variables = {f"{name}__{key.upper()}": str(value) for key, value in values.items()}
    apply(config.resolve([], {name: "1", **variables}, PATCHES), Process.SERVER)
    entry = LEDGER.named(PATCH.name)
    assert entry.state is State.APPLIED, entry.reason
    for counter in entry.counters:
        entry.counters[counter] = 0
    try:
        yield entry.counters
    finally:
        uninstall(PATCH)


def _written() -> None:
    """Wait until the patch's thread has written what it was given."""
    from omni_fastpath.patches.lean_front_end.wrappers import writer

    until = time.monotonic() + 10
    while not writer.idle:
        assert time.monotonic() < until
        time.sleep(0.001)


def _state() -> tuple[str, str]:
    from omni_fastpath.ledger import LEDGER

    entry = LEDGER.named("lean_front_end")
    return entry.state.value, entry.reason


def aggregator(seed: int) -> Any:
    """A random one: any number of stages, transfers and kinds of output, ended well, failed, or with nothing at all."""
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


SEEDS = range(300)


@pytest.fixture(scope="module")
def stock() -> list[tuple[Any, list[str]]]:
    """What upstream returns and logs for each seed."""
    handler, root = _Log(), logging.getLogger("vllm")
    root.addHandler(handler)
    found = []
    try:
        for seed in SEEDS:
            handler.clear()
            found.append((aggregator(seed).build_and_log_summary(), handler.of_upstream()))
    finally:
        root.removeHandler(handler)
    return found


@every_release
@pytest.mark.parametrize("mode", ["full", "thread"])
def test_the_text_is_upstreams(mode: str, log: _Log, stock: list[Any]) -> None:
    """Every record of a random request's summary, its place in the source and its order are stock's, and the result."""
    with switched_on(summary=mode) as counters:
        results = []
        for seed in SEEDS:
            results.append(aggregator(seed).build_and_log_summary())
            if seed % 100 == 0:
                _written()
        _written()
        assert _state()[0] == "applied"
        assert counters["tables"] > 2 * len(SEEDS)
        assert counters["requests"] == len(SEEDS)
        assert counters["handed_over"] == (len(SEEDS) if mode == "thread" else 0)
        assert counters["dropped"] == 0
    assert results == [result for result, _ in stock]
    assert log.of_upstream() == [line for _, lines in stock for line in lines]
    expected = {"omni-fastpath-log"} if mode == "thread" else {"MainThread"}
    assert {t for t, record in zip(log.threads, log.records, strict=True) if record.name == STATS} == expected
    assert {record.threadName for record in log.records if record.name == STATS} == {"MainThread"}


def _is_table(line: str) -> bool:
    return "[OmniTiming]" not in line


@every_release
def test_a_line_is_upstreams_line(log: _Log, stock: list[Any]) -> None:
    """With ``line``, of each request upstream's [OmniTiming] line is left; of one without it, all that stock writes."""
    with switched_on(summary="line") as counters:
        results = [aggregator(seed).build_and_log_summary() for seed in SEEDS]
        left_out = counters["left_out"]
    assert results == [result for result, _ in stock]
    expected: list[str] = []
    dropped = 0
    for _, lines in stock:
        timing = [line for line in lines if not _is_table(line)]
        expected += timing or lines
        dropped += len(lines) - len(timing or lines)
    assert log.of_upstream() == expected
    assert left_out == dropped > 0
    assert any(map(_is_table, expected))


@every_release
@pytest.mark.parametrize("mode", ["line", "interval"])
def test_what_is_left_out_stands_at_debug(mode: str, log: _Log, stock: list[Any]) -> None:
    """With DEBUG on, what the mode leaves out is written in stock's order, with DEBUG as its level."""
    logger = logging.getLogger(STATS)
    logger.setLevel(logging.DEBUG)
    try:
        with switched_on(summary=mode) as counters:
            for seed in SEEDS:
                aggregator(seed).build_and_log_summary()
            assert counters["left_out"] == 0
    finally:
        logger.setLevel(logging.NOTSET)
    expected = [line for _, lines in stock for line in lines]
    # Every further line of a message begins with the first one's prefix, level included.
    assert [line.replace("DEBUG", "INFO") for line in log.of_upstream()] == expected
    levels = {record.levelname for record in log.records if record.name == STATS and _is_table(record.getMessage())}
    assert "DEBUG" in levels


@every_release
def test_an_interval_stands_for_all_its_requests(log: _Log, stock: list[Any]) -> None:
    """With ``interval``, one line says how many requests ended, how long they took and their tokens."""
    with switched_on(summary="interval", interval_s=3600) as counters:
        results = [aggregator(seed).build_and_log_summary() for seed in SEEDS]
        assert counters["left_out"] == sum(len(lines) for _, lines in stock)
    assert results == [result for result, _ in stock]
    assert log.of_upstream() == []
    [line] = [line for line in log.of_ours() if "requests ended" in line]
    rows = [row for result, _ in stock for row in result["e2e_table"]]
    assert f" {len(SEEDS)} requests ended in " in line
    assert f", {len(rows)} of them completely, in " in line
    assert f"{sum(row['e2e_total_tokens'] for row in rows):,} tokens" in line


def test_an_interval_ends_by_itself(log: _Log) -> None:
    """The line comes after the interval, without a further request; then there is silence."""
    with switched_on(summary="interval", interval_s=0.1):
        _ended().build_and_log_summary()
        deadline = time.monotonic() + 10
        while not any("requests ended" in line for line in log.lines) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.35)
        assert len([line for line in log.of_ours() if re.search(r" 1 requests ended in \d+\.\d s", line)]) == 1
    assert len([line for line in log.of_ours() if "requests ended" in line]) == 1


def _ended(request_id: str = "chatcmpl-1", tokens: int = 30) -> Any:
    from benchmarks.front_end.ended import ended

    return ended(request_id, tokens)


@every_release
def test_what_changes_later_is_not_in_the_text(log: _Log) -> None:
    """A table that is made later shows the latencies and totals as they were at the request's end."""
    hold = threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == STATS:
                hold.wait(10)

    slow, root = Slow(), logging.getLogger("vllm")
    root.handlers.insert(0, slow)
    try:
        with switched_on(summary="thread"):
            request = _ended()
            result = request.build_and_log_summary()
            for events in request.stage_events.values():
                for stats in events:
                    stats.vllm_itls_ms.clear()
                    stats.inter_output_latencies_ms.append(10**6)
                    stats.num_tokens_out = 999_999
            result["overall_summary"]["e2e_total_tokens"] = 999_999
            hold.set()
            _written()
    finally:
        hold.set()
        root.removeHandler(slow)
    (table,) = [line for line in log.of_upstream() if "StageRequestStats" in line]
    assert "(n=29)" in table
    assert "999,999" not in "".join(log.of_upstream())


def test_too_many_waiting_are_dropped_and_said(log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log hangs, the loop goes on; what was dropped is counted, and said when the log runs again."""
    from omni_fastpath.patches.lean_front_end import writer

    monkeypatch.setattr(writer, "MOST_WAITING", 3)
    hold = threading.Event()

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == STATS:
                hold.wait(10)

    hanging, root = Hanging(), logging.getLogger("vllm")
    root.addHandler(hanging)
    try:
        with switched_on(summary="thread") as counters:
            _ended("first").build_and_log_summary()
            until = time.monotonic() + 10
            while not log.of_upstream() and time.monotonic() < until:
                time.sleep(0.001)
            for number in range(8):
                _ended(f"later-{number}").build_and_log_summary()
            assert counters["handed_over"] == 4
            assert counters["dropped"] == 5
            hold.set()
            _written()
            assert [line for line in log.of_ours() if "the summaries of 5 requests were dropped" in line]
    finally:
        hold.set()
        root.removeHandler(hanging)
    timing = [line for line in log.of_upstream() if "[OmniTiming]" in line]
    assert [line.split("req=")[1].split()[0] for line in timing] == ["first", "later-0", "later-1", "later-2"]


def test_a_log_that_hangs_does_not_hold_a_server_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits a second for a hanging handler, and a half for it to say so; then the process may end."""
    from omni_fastpath.patches.lean_front_end import writer

    monkeypatch.setattr(writer, "_AT_EXIT_S", 0.1)
    hold, began = threading.Event(), threading.Event()

    def handle(_record: logging.LogRecord) -> None:
        began.set()
        hold.wait(10)

    found = writer.Writer(handle)
    record = logging.makeLogRecord({})
    for _ in range(4):
        assert found.put((record,))
    assert began.wait(10)
    before = time.monotonic()
    found.close()
    assert time.monotonic() - before < 1
    hold.set()


def test_closing_writes_what_waits() -> None:
    """What was handed over before the end of the process is written, in order."""
    from omni_fastpath.patches.lean_front_end.writer import Writer

    seen: list[int] = []
    found = Writer(lambda record: seen.append(record.levelno))
    for number in range(100):
        assert found.put((logging.makeLogRecord({"levelno": number}),))
    found.close()
    assert seen == list(range(100))
    assert found.idle


def test_a_records_context_goes_with_it(log: _Log) -> None:
    """A handler that asks for the request's context (a trace's id) finds it on the other thread too."""
    import contextvars

    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="none")
    seen = []

    class Tracing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == STATS:
                seen.append(trace.get())

    handler, root = Tracing(), logging.getLogger("vllm")
    root.addHandler(handler)
    try:
        with switched_on(summary="thread"):
            contextvars.copy_context().run(lambda: (trace.set("mine"), _ended().build_and_log_summary()))
            _written()
    finally:
        root.removeHandler(handler)
    assert set(seen) == {"mine"}
    assert log.of_upstream()


@every_release
@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_ours_steps_aside(mode: str, log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that cannot be made is upstream's, the state says so once, and later requests are upstream's alone."""
    from omni_fastpath.patches.lean_front_end import table

    expected = _lines_of_stock(2)
    log.clear()

    def broken(_self: Any) -> str:
        raise ZeroDivisionError("ours")

    logger = logging.getLogger(STATS)
    logger.setLevel(logging.DEBUG)
    try:
        with switched_on(summary=mode, interval_s=3600):
            monkeypatch.setattr(table.LeanTable, "get_string", broken)
            _ended("request-0").build_and_log_summary()
            _written()
            state, reason = _state()
            assert state == "failed"
            assert "ZeroDivisionError('ours')" in reason
            _ended("request-1").build_and_log_summary()
    finally:
        logger.setLevel(logging.NOTSET)
    assert [_bare(line) for line in log.of_upstream()] == expected
    assert len([line for line in log.of_ours() if "lean_front_end failed" in line]) == 1


@every_release
@pytest.mark.parametrize("what", ["table._copied", "writer.Writer.put"])
def test_an_error_of_ours_loses_no_record(what: str, log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of ours fails on the way to the thread, the request's records are written, once and in order."""
    from omni_fastpath.patches.lean_front_end import table, writer

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("ours")

    expected = _lines_of_stock(2)
    log.clear()
    owner, _, name = what.rpartition(".")
    with switched_on(summary="thread"):
        monkeypatch.setattr({"table": table, "writer.Writer": writer.Writer}[owner], name, broken)
        _ended("request-0").build_and_log_summary()
        _ended("request-1").build_and_log_summary()
        assert _state()[0] == "failed"
        _written()
    assert [_bare(line) for line in log.of_upstream()] == expected


@every_release
@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_a_handler_is_the_handlers(mode: str, log: _Log) -> None:
    """A handler that raises: the same error at the same place as on stock, no record twice, and the patch goes on."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == STATS:
                raise OSError("the disk is full")

    def run() -> list[str]:
        log.clear()
        found = []
        try:
            _ended().build_and_log_summary()
        except OSError as error:
            found.append(repr(error))
        return found + [_bare(line) for line in log.of_upstream()]

    broken, root = Broken(), logging.getLogger("vllm")
    root.addHandler(broken)
    try:
        expected = run()
        with switched_on(summary=mode, interval_s=3600):
            found = run()
            _written()
            assert _state()[0] == "applied"
        if mode == "full":
            assert found == expected
        elif mode == "line":
            assert found[0] == expected[0]
            assert len(found) == 2
    finally:
        root.removeHandler(broken)


@every_release
def test_after_an_error_nothing_overtakes_what_waits(log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the thread has not written yet comes before the summaries that upstream makes alone."""
    from omni_fastpath.patches.lean_front_end import wrappers

    expected = _lines_of_stock(4)
    log.clear()
    goes_on, write = threading.Event(), log.emit

    def emit(record: logging.LogRecord) -> None:
        if threading.current_thread().name == "omni-fastpath-log":
            assert goes_on.wait(10)
        write(record)

    monkeypatch.setattr(log, "emit", emit)
    with switched_on(summary="thread") as counters:
        _ended("request-0").build_and_log_summary()
        monkeypatch.setattr(wrappers, "Table", lambda *_: 1 / 0)
        _ended("request-1").build_and_log_summary()
        assert _state()[0] == "failed"
        _ended("request-2").build_and_log_summary()
        goes_on.set()
        _written()
        _ended("request-3").build_and_log_summary()
        assert counters["handed_over"] == 3
        assert log.threads[-1] != "omni-fastpath-log"
    assert [_bare(line) for line in log.of_upstream()] == expected


def _lines_of_stock(requests: int) -> list[str]:
    handler, root = _Log(), logging.getLogger("vllm")
    root.addHandler(handler)
    try:
        for number in range(requests):
            _ended(f"request-{number}").build_and_log_summary()
    finally:
        root.removeHandler(handler)
    return [_bare(line) for line in handler.of_upstream()]


def _bare(line: str) -> str:
    """Without the level, and without the seconds of the clock."""
    import re

    return re.sub(r"[0-9.,]+", "#", line.replace("DEBUG", "INFO")).replace(" ", "").replace("-", "")


@every_release
def test_a_text_that_differs_is_not_written(log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first table of each shape is compared with PrettyTable's: another release of it is noticed."""
    import prettytable

    monkeypatch.setattr(prettytable.PrettyTable, "get_string", lambda _self: "another release's")
    with switched_on(summary="full") as counters:
        _ended().build_and_log_summary()
        assert _state()[0] == "failed"
        assert "not as PrettyTable prints it" in _state()[1]
        assert counters["tables"] == 0
    assert all("another release's" in line for line in log.of_upstream() if _is_table(line))


@every_release
def test_an_error_of_upstreams_is_upstreams(log: _Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary that fails half-way raises as stock does; what it had logged is written."""
    request = _ended()
    request.transfer_events[0, 1, "other"] = None
    with pytest.raises(AttributeError):
        request.build_and_log_summary()
    expected = log.of_upstream()
    for mode in ("full", "thread", "line"):
        log.clear()
        with switched_on(summary=mode):
            with pytest.raises(AttributeError):
                request.build_and_log_summary()
            _written()
            assert _state()[0] == "applied"
        assert log.of_upstream() == expected


def test_a_log_that_is_off_costs_no_table(log: _Log) -> None:
    """Where INFO is off, upstream makes its tables and throws them away; with the patch none is made."""
    logger = logging.getLogger(STATS)
    logger.setLevel(logging.WARNING)
    try:
        for mode in MODES:
            with switched_on(summary=mode) as counters:
                assert _ended().build_and_log_summary()["stage_table"]
                _written()
                assert counters["tables"] == 0
                assert counters["requests"] == 1
    finally:
        logger.setLevel(logging.NOTSET)
    assert log.of_upstream() == []


@every_release
def test_off_is_upstreams_own() -> None:
    """Taken off, the slots and the logger are as before."""
    from vllm_omni.metrics import stats, utils

    logger = logging.getLogger(STATS)
    before = vars(stats.OrchestratorAggregator)["build_and_log_summary"], list(logger.filters)
    with switched_on(summary="thread"):
        _ended().build_and_log_summary()
        assert len(logger.filters) == len(before[1]) + 1
    assert vars(stats.OrchestratorAggregator)["build_and_log_summary"] is before[0]
    assert stats._format_table is utils._format_table
    assert logger.filters == before[1]


def test_others_of_the_logger_are_not_held(log: _Log) -> None:
    """A warning of upstream's outside a summary is written at once."""
    with switched_on(summary="line"):
        _ended().build_and_log_summary()
        logging.getLogger(STATS).warning("Failed to record audio generated frames")
        assert "Failed to record" in log.of_upstream()[-1]


class _Calls:
    """Stands for upstream's Prometheus metrics: which of its methods were called, in order."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: self.made.append(name)


def _messages() -> list[Any]:
    """What the real orchestrator sends to the front end of one request: text, audio, each stage's end and metrics."""
    from vllm.v1.engine import FinishReason

    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text

    pipeline = Pipeline()
    pipeline.add_request("one")
    stop = FinishReason.STOP
    pipeline.put(0, *(batch(text("one", n)) for n in range(6)), batch(text("one", 9, finish=stop)))
    pipeline.put(1, *(batch(codes("one")) for _ in range(6)), batch(codes("one", finish=stop)))
    with pipeline:
        pipeline.settle()
        pipeline.put(2, batch(silent("one")), *(batch(audio("one", 0.1, -0.2)) for _ in range(4)))
        pipeline.settle()
        pipeline.put(2, batch(audio("one", 0.3, finish=stop)))
        pipeline.settle()
    assert pipeline.crash is None
    found: list[Any] = pipeline.messages()
    return found


async def _served(messages: list[Any]) -> tuple[list[Any], list[str], list[list[str]]]:
    """What upstream's front end yields of the messages, its Prometheus calls, and its requests before each log record.

    The real methods of ``AsyncOmni`` from a message out of the orchestrator's queue to the clean-up after the last.
    """
    from types import SimpleNamespace

    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.client_request_state import ClientRequestState
    from vllm_omni.metrics.stats import OrchestratorAggregator

    from benchmarks.rigs.inprocess import QWEN3_OMNI

    omni, calls = object.__new__(AsyncOmni), _Calls()
    stages = [
        SimpleNamespace(
            final_output=stage.final_output, final_output_type=stage.modality, stage_type="llm", model_stage=f"part{n}"
        )
        for n, stage in enumerate(QWEN3_OMNI)
    ]
    omni.engine = SimpleNamespace(get_stage_metadata=lambda n: stages[n], num_stages=3, shutdown=lambda: None)
    omni.log_stats, omni._enable_ar_profiler = True, False
    omni.prom_metrics = omni.mod_metrics = calls
    state = ClientRequestState("one", external_request_id="outside", final_stage_id=2)
    state.metrics = OrchestratorAggregator(3, True, 1_700_000_000.0, 2)
    omni.request_states = {"one": state}
    present: list[list[str]] = []

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == STATS:
                present.append(list(omni.request_states))

    watching, root = Watching(), logging.getLogger("vllm")
    root.addHandler(watching)
    outputs = []
    try:
        for message in messages:
            skip, *_ = omni._handle_output_message(message)
            if not skip:
                state.queue.put_nowait(message)
        async for output in omni._process_orchestrator_results("one", state.metrics, 2, {"one": 1.7e9}, 1.7e9):
            metrics = dict(output.metrics)
            tokens = [list(each.token_ids) for each in output.outputs]
            sound = [repr(getattr(each, "multimodal_output", None)) for each in output.outputs]
            outputs.append((output.request_id, output.final_output_type, output.finished, tokens, sound, metrics))
        omni._log_summary_and_cleanup("one")
        assert omni.request_states == {}
        assert calls.made[-2:] == ["set_running", "set_waiting"]
    finally:
        root.removeHandler(watching)
    return outputs, calls.made, present


async def test_the_front_end_does_the_same(log: _Log) -> None:
    """In every mode: same outputs and stage metrics for clients, same Prometheus calls, requests and gauges popped."""
    messages = _messages()
    expected = await _served(messages)
    lines = [_bare(line) for line in log.of_upstream()]
    assert expected[2] == [["one"]] * len(lines)
    assert any(metrics.get("stage_metrics") for *_, metrics in expected[0])
    for mode in MODES:
        log.clear()
        with switched_on(summary=mode) as counters:
            outputs, calls, _ = await _served(messages)
            _written()
            assert counters["requests"] == 1
            assert _state()[0] == "applied"
        assert (outputs, calls) == expected[:2]
        found = [_bare(line) for line in log.of_upstream()]
        timing = [line for line in lines if "[OmniTiming]" in line]
        assert found == {"full": lines, "thread": lines, "line": timing, "interval": []}[mode]


async def test_a_failed_request_leaves_its_trace(log: _Log) -> None:
    """A request that ends without its last output is counted as failed, popped, and its tables are written."""
    messages = [message for message in _messages() if not getattr(message, "finished", False)]
    for mode in MODES:
        log.clear()
        with switched_on(summary=mode, interval_s=3600):
            from types import SimpleNamespace

            from vllm_omni.entrypoints.async_omni import AsyncOmni
            from vllm_omni.entrypoints.client_request_state import ClientRequestState
            from vllm_omni.metrics.stats import OrchestratorAggregator

            omni, calls = object.__new__(AsyncOmni), _Calls()
            omni.engine = SimpleNamespace(
                get_stage_metadata=lambda _: SimpleNamespace(final_output_type="text"), shutdown=lambda: None
            )
            omni.log_stats, omni.prom_metrics = True, calls
            state = ClientRequestState("one")
            state.metrics = OrchestratorAggregator(3, True, 1_700_000_000.0, 2)
            omni.request_states = {"one": state}
            for message in messages:
                omni._handle_output_message(message)
            omni._log_summary_and_cleanup("one")
            assert omni.request_states == {}
            assert "request_failed" in calls.made
            _written()
        if mode == "interval":
            assert [line for line in log.of_ours() if "1 requests ended" in line and "none of them completely" in line]
        else:
            assert [line for line in log.of_upstream() if "Stats" in line or "Summary" in line]


def _samples(seed: int) -> Any:
    """Random floats of one channel: levels of 16 bits and their ties, all exponents, beyond the range, none at all."""
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


@every_release
def test_files_are_soundfiles() -> None:
    """Every byte of WAV and 16-bit PCM is what soundfile writes, of random chunks through upstream's own function."""
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
    with switched_on(wav=False) as counters:
        assert make(0) == expected[0]
        assert counters["files"] == 0


@every_release
def test_what_is_not_plain_is_soundfiles() -> None:
    """Two channels, other numbers, values that are not finite, other formats and a buffer in use go to soundfile."""
    from io import BytesIO

    import numpy as np
    import soundfile  # type: ignore[import-untyped]

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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile's callbacks
def test_a_callers_mistake_is_the_callers() -> None:
    """A closed buffer, one that somebody looks into, a name that is none: soundfile's answer, and the patch goes on."""
    from io import BytesIO

    import soundfile

    def error(file: BytesIO, **named: Any) -> Any:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            soundfile.write(file, _samples(7), 24_000, **named)
        return raised.type, str(raised.value)

    def mistakes() -> list[Any]:
        closed, seen = BytesIO(), BytesIO()
        closed.close()
        with seen.getbuffer():
            found = error(seen, format="WAV")
        return [
            found,
            error(closed, format="WAV"),
            error(BytesIO(), format=["WAV"]),
            error(BytesIO(), format="WAV", subtype=[]),
        ]

    expected = mistakes()
    with switched_on() as counters:
        for _ in range(2):
            soundfile.write(BytesIO(), _samples(7), 24_000, format="WAV")
        assert mistakes() == expected
        assert _state()[0] == "applied"
        soundfile.write(BytesIO(), _samples(7), 24_000, format="WAV")
        assert counters["files"] == 2


@every_release
def test_a_file_that_differs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another libsndfile that writes other bytes is noticed at the first file, which is its own; so is an error."""
    from io import BytesIO

    import soundfile

    def written() -> bytes:
        file = BytesIO()
        soundfile.write(file, _samples(7), 24_000, format="WAV")
        return file.getvalue()

    def broken(*_: Any) -> bytes:
        raise ZeroDivisionError("ours")

    expected = written()
    for ours, reason in ((lambda *_: b"RIFF", "not as soundfile writes it"), (broken, "ZeroDivisionError")):
        with monkeypatch.context() as patched, switched_on() as counters:
            from omni_fastpath.patches.lean_front_end import wrappers

            patched.setitem(wrappers._FORMS, ("WAV", None), ours)
            assert [written(), written()] == [expected, expected]
            assert _state()[0] == "failed"
            assert reason in _state()[1]
            assert counters["files"] == 0
