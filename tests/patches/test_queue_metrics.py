"""What is observed of queues: each raw output that is routed, by whichever loop, and nothing of upstream changed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import Process, State
from omni_fastpath.ledger import LEDGER
from tests.patches.content import sequences
from tests.patches.drive import only, options, run, stages

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

THINKER, TALKER, CODE2WAV = range(3)
DRAIN = ("nonblocking_dequeue", "budgeted_drain")


@contextmanager
def observed(*others: str) -> Iterator[None]:
    """The patch installed as a server installs it, with these beside it."""
    with only(*others, "queue_metrics"):
        yield


def shown(metric: str) -> dict[tuple[str, ...], Any]:
    """The samples of a metric now, by their labels' values."""
    record = LEDGER.snapshot()["queue_metrics"]
    found = record.get("figures", {}).get(f"omni_fastpath_{metric}", ())
    return {tuple(each["labels"].values()): each for each in found}


def counts(metric: str) -> dict[tuple[str, ...], int]:
    """How many observations a histogram has, by its labels' values."""
    return {labels: sum(each["counts"]) for labels, each in shown(metric).items()}


@pytest.fixture(params=[False, True], ids=["poll", "event-driven"])
def event_driven(request: pytest.FixtureRequest) -> bool:
    """The modes that this release has."""
    from benchmarks.rigs.upstream import event_driven_modes

    if request.param not in event_driven_modes():
        pytest.skip("this release has no event-driven orchestrator")
    return bool(request.param)


@pytest.fixture(params=[(), DRAIN], ids=["upstream's loop", "drain"])
def others(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Whose loop runs."""
    found: tuple[str, ...] = request.param
    return found


def filled(event_driven: bool, replicas: int = 2) -> Any:
    """A pipeline whose queues are filled before it runs: two requests, each on a replica of its own."""
    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text

    pipeline = Pipeline(stages(replicas), event_driven=event_driven)
    for replica, name in enumerate(("one", "two")):
        at = replica % replicas
        pipeline.add_request(name, replicas=(at, at, at))
        pipeline.put(THINKER, *(batch(text(name, token)) for token in range(5)), replica_id=at)
        pipeline.put(TALKER, *(batch(codes(name)) for _ in range(4)), replica_id=at)
        pipeline.put(CODE2WAV, batch(silent(name)), *(batch(audio(name, 1.0)) for _ in range(2)), replica_id=at)
    return pipeline


# ---- In the real orchestrator ----


@every_release
def test_as_many_as_were_routed(event_driven: bool, others: tuple[str, ...]) -> None:
    """Each raw output of each replica is counted once, in both of upstream's loops and under the drain."""
    with observed(*others):
        run(filled(event_driven))
        found = counts("residence_seconds")
        entry = LEDGER.named("queue_metrics")
    expected = {THINKER: 5, TALKER: 4, CODE2WAV: 3}
    assert found == {(str(stage), str(at)): count for stage, count in expected.items() for at in range(2)}
    assert (entry.counters["observed"], entry.counters["entries"]) == (24, 24)


@every_release
def test_first_audio_is_counted_once(event_driven: bool, others: tuple[str, ...]) -> None:
    """Not what has a sample rate and no audio, and nothing after the first."""
    with observed(*others):
        run(filled(event_driven))
        assert counts("first_audio_residence_seconds") == {("2", "0"): 1, ("2", "1"): 1}
        assert counts("first_audio_entries_ahead") == {("2", "0"): 1, ("2", "1"): 1}
        # The rig's requests are not detokenized.
        assert counts("first_text_residence_seconds") == {("0", "0"): 0, ("0", "1"): 0}


@every_release
def test_what_is_shown_begins_at_nothing(event_driven: bool) -> None:
    """Before anything is routed each replica has series, of firsts where the user gets some; no rate misses one."""
    from benchmarks.rigs.inprocess import Pipeline

    with observed(), Pipeline(stages(2), event_driven=event_driven) as pipeline:
        pipeline.settle()
        assert counts("residence_seconds") == {(str(stage), str(at)): 0 for stage in range(3) for at in range(2)}
        assert counts("first_text_residence_seconds") == {("0", "0"): 0, ("0", "1"): 0}
        assert counts("first_audio_residence_seconds") == {("2", "0"): 0, ("2", "1"): 0}
        assert counts("first_audio_entries_ahead") == {("2", "0"): 0, ("2", "1"): 0}


@every_release
@pytest.mark.parametrize("others", [(), DRAIN], ids=["upstream's loop", "drain"])
def test_entries_ahead_of_first_audio(others: tuple[str, ...]) -> None:
    """Upstream's poll loop takes one of each replica in turn; the drain takes what the user hears first."""
    with observed(*others), options(floor=0.0) if others else nullcontext():
        run(filled(event_driven=False, replicas=1))
        found = shown("first_audio_entries_ahead")["2", "0"]
    # First audio stands second and fifth in its queue: in turn behind 5 and 14, and by itself behind one and four.
    assert (sum(found["counts"]), found["sum"]) == (2, 5.0 if others else 19.0)


@every_release
def test_nothing_that_is_sent_differs(event_driven: bool, others: tuple[str, ...]) -> None:
    """The same messages with the patch and without it."""
    with only(*others):
        expected = sequences(run(filled(event_driven)))
    with observed(*others):
        assert sequences(run(filled(event_driven))) == expected


@every_release
def test_depth_is_what_waits_now() -> None:
    """Of each replica from the start on, and of none when the orchestrator is gone; what was counted alone stays."""
    from omni_fastpath.patches.queue_metrics import wrappers

    with observed():
        pipeline = filled(event_driven=False)
        with pipeline:
            pipeline.settle()
            depth = {labels: each["value"] for labels, each in shown("queued_raw_outputs").items()}
        pipeline.put(TALKER, "never taken", replica_id=1)
        later = {labels: each["value"] for labels, each in shown("queued_raw_outputs").items()}
        del pipeline
        gc.collect()
        assert shown("queued_raw_outputs") == {}
        assert sum(counts("residence_seconds").values()) == 24
        account, lag = wrappers._accounts[0], wrappers._lags[0]
        assert (dict(account.firsts), list(account.routed), lag._loop) == ({}, [], None)
    assert depth == {(str(stage), str(at)): 0 for stage in range(3) for at in range(2)}
    assert later == {**depth, ("1", "1"): 1}


@every_release
def test_the_orchestrators_loop_is_watched() -> None:
    """Its lag is there from the beginning, and the front end's from its first request on."""
    from omni_fastpath.patches.queue_metrics import wrappers

    with observed():
        run(filled(event_driven=False))
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",)}

        async def front_end() -> None:
            for _ in range(2):
                wrappers.wrapped_final_output_handler(lambda: None, None, (), {})

        asyncio.run(front_end())
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",), ("front_end",)}
        assert len(wrappers._lags) == 2


@every_release
def test_taken_off_leaves_nothing(event_driven: bool) -> None:
    """An orchestrator that runs has its own methods again, and its messages go on."""
    from benchmarks.rigs.inprocess import batch, text

    pipeline = filled(event_driven)
    before = set(vars(pipeline.orchestrator))
    with pipeline:
        pipeline.settle()
    pipeline = filled(event_driven)
    with observed():
        running = pipeline.__enter__()
        try:
            pipeline.settle()
            assert set(vars(pipeline.orchestrator)) > before
        except BaseException:
            pipeline.__exit__()
            raise
    with contextless(running):
        assert set(vars(pipeline.orchestrator)) == before
        pipeline.messages()
        pipeline.put(THINKER, batch(text("one", 9)))
        pipeline.settle()
        assert pipeline.messages()
    assert "figures" not in LEDGER.snapshot()["queue_metrics"]


@contextmanager
def contextless(running: Any) -> Iterator[None]:
    """The rest of a pipeline's life, whose beginning stood in another block."""
    try:
        yield
    finally:
        running.__exit__()


@every_release
def test_an_exception_of_ours_reaches_nobody(
    event_driven: bool, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, observing ends, and every message is sent."""
    from omni_fastpath.patches.queue_metrics.account import Account

    with only(*others):
        expected = sequences(run(filled(event_driven)))
    monkeypatch.setattr(Account, "note_firsts", lambda *_: 1 / 0)
    with observed(*others):
        pipeline = filled(event_driven)
        assert sequences(run(pipeline)) == expected
        entry = LEDGER.named("queue_metrics")
        assert entry.state is State.FAILED
        assert "ZeroDivisionError" in entry.reason
        assert "_handle_processed_outputs" not in vars(pipeline.orchestrator)
        assert not LEDGER.snapshot()["queue_metrics"].get("figures")
    assert caplog.text.count("observing failed: ZeroDivisionError") <= 1


# ---- What stands in front ----


class Made:
    """An orchestrator of the test's own, with the two methods; stage 0 gives text, stage 1 nothing, stage 2 audio."""

    def __init__(self) -> None:
        self.stage_pools = [pool("text"), pool(None), pool("audio")]
        self.calls: list[Any] = []

    async def _process_llm_stage_outputs(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return "processed"

    async def _handle_processed_outputs(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return "routed"


def pool(gives: str | None) -> Any:
    """A pool with one replica in this process."""
    client = _Object(final_output_type=gives)
    return _Object(
        clients=[client],
        stage_client=client,
        final_output=gives is not None,
        _audio_frames_by_request={},
        _non_empty_first_output_timestamps_by_request={},
    )


class _Object(SimpleNamespace):
    """One that can be weakly referred to."""


class Client(SimpleNamespace):
    """One whose socket listens on an address."""

    def __init__(self, address: bytes, **resources: Any) -> None:
        socket = SimpleNamespace(LAST_ENDPOINT=address)
        super().__init__(resources=SimpleNamespace(output_socket=socket, **resources))


def raw(constructed_s: float, entries: int = 1) -> Any:
    """A raw output."""
    return SimpleNamespace(timestamp=constructed_s, outputs=[object()] * entries)


@contextmanager
def fronted(orchestrator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Fronts on it, with a clock that the test sets: ``account``, ``now`` and the errors that were told."""
    with only("queue_metrics"):
        from omni_fastpath.patches.queue_metrics import fronts
        from omni_fastpath.patches.queue_metrics.account import Account

        found = SimpleNamespace(now=100.0, errors=[], account=Account(orchestrator))
        monkeypatch.setattr(fronts, "monotonic", lambda: found.now)
        found.fronts = fronts.Fronts(orchestrator, found.account, found.errors.append)
        yield found


def test_what_upstream_is_given_and_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very objects, however they are passed, and its result."""
    orchestrator = Made()
    outputs: list[Any] = []
    names: set[str] = set()
    given = raw(99.0)

    async def both() -> list[Any]:
        return [
            await orchestrator._process_llm_stage_outputs(2, 0, given, raw_terminal_request_ids=names),
            await orchestrator._handle_processed_outputs(2, 0, outputs=outputs),
        ]

    with fronted(orchestrator, monkeypatch) as found:
        assert asyncio.run(both()) == ["processed", "routed"]
        line = found.account.lines[2, 0]
    assert orchestrator.calls[0][0][2] is given
    assert orchestrator.calls[0][0][3] is names
    assert orchestrator.calls[1][0][2] is outputs
    assert (sum(line.residence.counts), line.residence.sum) == (1, 1.0)
    assert not found.errors


def test_what_was_not_routed_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a raw output whose processing or routing raised, nor a diffusion stage's output after it."""
    orchestrator = Made()

    async def raises(*_: Any) -> None:
        raise ValueError("upstream's")

    async def all_of_it() -> None:
        for method in ("_process_llm_stage_outputs", "_handle_processed_outputs"):
            with pytest.raises(ValueError, match="upstream's"):
                await getattr(orchestrator, method)(*((2, 0, raw(99.0), set())[: 4 if "process_llm" in method else 3]))
        await Made._handle_processed_outputs(orchestrator, 1, 0, [])

    orchestrator._process_llm_stage_outputs = raises  # type: ignore[method-assign]
    orchestrator._handle_processed_outputs = raises  # type: ignore[method-assign]
    with fronted(orchestrator, monkeypatch) as found:
        asyncio.run(all_of_it())
        assert not found.account.lines
        found.fronts.remove()
    assert vars(orchestrator)["_process_llm_stage_outputs"] is raises


def test_first_audio_and_what_went_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever enters upstream's record between the two is a first; what was routed after its construction is ahead."""
    orchestrator = Made()
    audio = orchestrator.stage_pools[2]._audio_frames_by_request
    text = orchestrator.stage_pools[0]._non_empty_first_output_timestamps_by_request

    async def one(found: Any, stage: int, constructed_s: float, entries: int, record: Any = None) -> None:
        await orchestrator._process_llm_stage_outputs(stage, 0, raw(constructed_s, entries), set())
        if record is not None:
            record[f"r{len(record)}"] = 1
        await orchestrator._handle_processed_outputs(stage, 0, [])
        found.now += 1

    async def script(found: Any) -> None:
        await one(found, 0, 99.5, 3, text)  # routed at 100
        await one(found, 1, 99.5, 4)  # at 101
        await one(found, 1, 99.5, 5)  # at 102
        await one(found, 2, 100.5, 2, audio)  # at 103: behind 4 and 5
        await one(found, 2, 103.5, 2)  # its second
        await one(found, 2, 104.5, 1, audio)  # at 105: nothing since

    with fronted(orchestrator, monkeypatch) as found:
        asyncio.run(script(found))
        first, last = found.account.lines[0, 0], found.account.lines[2, 0]
    assert (sum(first.first_text.counts), first.first_text.sum) == (1, 0.5)
    assert sum(first.first_audio.counts) == sum(last.first_text.counts) == 0
    assert (sum(last.first_audio.counts), last.first_audio.sum) == (2, 3.0)
    assert (sum(last.ahead.counts), last.ahead.counts[0], last.ahead.sum) == (2, 1, 9.0)
    assert found.account.entries == 17


class Nested(Made):
    """As 0.32: what carries a first audio routes it inside of its own processing, and what has waited for it."""

    async def _process_llm_stage_outputs(self, *args: Any, **kwargs: Any) -> Any:
        if args[0] == 1:
            await self._flush_upstream_first_audio(self.state)
        return await super()._process_llm_stage_outputs(*args, **kwargs)

    async def _flush_upstream_first_audio(self, req_state: Any) -> None:
        if not self.may_flush:
            return
        req_state.pending_upstream_first_audio, req_state.upstream_first_audio = None, True
        self.stage_pools[2]._audio_frames_by_request["r"] = 1
        await self._handle_processed_outputs(2, 0, [])
        await self._process_llm_stage_outputs(2, 0, raw(0.0), set())
        await self._handle_processed_outputs(2, 0, [])

    may_flush = True

    @property
    def state(self) -> Any:
        """The one request's."""
        return self.__dict__.setdefault(
            "_state", SimpleNamespace(pending_upstream_first_audio=object(), upstream_first_audio=False)
        )


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later, by another task"])
def test_a_nested_call_counts_by_what_carried_it(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """One raw output, of the stage that made the first audio; its residence is the first audio's."""
    orchestrator = Nested()
    orchestrator.may_flush = not later

    async def script(found: Any) -> None:
        await orchestrator._process_llm_stage_outputs(1, 0, raw(98.0), set())
        await orchestrator._handle_processed_outputs(1, 0, [])
        if later:
            orchestrator.may_flush, found.now = True, 101.0
            await asyncio.create_task(orchestrator._flush_upstream_first_audio(orchestrator.state))

    with fronted(orchestrator, monkeypatch) as found:
        asyncio.run(script(found))
        assert set(found.account.lines) == {(1, 0)}
        line = found.account.lines[1, 0]
    assert (sum(line.residence.counts), line.residence.sum) == (1, 2.0)
    assert (sum(line.first_audio.counts), line.first_audio.sum) == (1, 3.0 if later else 2.0)
    assert not found.errors


def test_what_is_kept_of_a_front_is_inert_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who looked a method up before it was taken off still reaches upstream's, and nothing is counted."""
    orchestrator = Made()
    with fronted(orchestrator, monkeypatch) as found:
        process, route = orchestrator._process_llm_stage_outputs, orchestrator._handle_processed_outputs
        found.fronts.remove()

        async def both() -> list[Any]:
            return [await process(2, 0, raw(99.0), set()), await route(2, 0, [])]

        assert asyncio.run(both()) == ["processed", "routed"]
        assert not found.account.lines


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (_Object(), True),
        (Client(b"ipc:///tmp/x"), True),
        (Client(b"tcp://127.0.0.1:5555\0"), True),
        (Client(b"tcp://[::1]:5555"), True),
        (Client(b"tcp://10.0.0.1:5555"), False),
        (Client(b"tcp://0.0.0.0:5555"), False),
        (_Object(resources=_Object(output_socket=object())), False),
        (Client(b"tcp://10.0.0.1:5555", engine_manager=None), False),
        (Client(b"tcp://10.0.0.1:5555", engine_manager=object()), True),
    ],
    ids=[
        "in this process",
        "ipc",
        "loopback",
        "loopback, IPv6",
        "a network",
        "any",
        "closed",
        "attached",
        "spawned here",
    ],
)
def test_whose_clock_is_ours(client: Any, expected: bool) -> None:
    """Only where a replica runs on this host its time of construction says something here."""
    from omni_fastpath.patches.queue_metrics.upstream import is_on_this_host

    assert is_on_this_host(client) is expected


def test_another_hosts_replica_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that takes its slot on this host later is timed from the next look on."""
    orchestrator = Made()
    orchestrator.stage_pools[2].clients[0] = Client(b"tcp://10.0.0.1:5555")

    async def one() -> None:
        await orchestrator._process_llm_stage_outputs(2, 0, raw(99.0), set())
        await orchestrator._handle_processed_outputs(2, 0, [])

    with fronted(orchestrator, monkeypatch) as found:
        asyncio.run(one())
        line = found.account.lines[2, 0]
        assert (sum(line.residence.counts), line.elsewhere, found.account.entries) == (0, 1, 1)
        orchestrator.stage_pools[2].clients[0] = Client(b"ipc:///tmp/x")
        found.account.look()
        asyncio.run(one())
        assert (sum(line.residence.counts), line.elsewhere, line.raw_outputs) == (1, 1, 2)


@pytest.mark.parametrize(("address", "timed"), [(b"tcp://10.0.0.1:5555", 0), (b"ipc:///tmp/x", 1)])
def test_an_empty_slot_keeps_whose_it_was(monkeypatch: pytest.MonkeyPatch, address: bytes, timed: int) -> None:
    """A dead replica's raw outputs are still routed, and those of its next life before the next look at the slot."""
    orchestrator = Made()
    clients = orchestrator.stage_pools[2].clients

    async def one() -> None:
        await orchestrator._process_llm_stage_outputs(2, 0, raw(99.0), set())
        await orchestrator._handle_processed_outputs(2, 0, [])

    with fronted(orchestrator, monkeypatch) as found:
        clients[0] = dead = Client(address)
        asyncio.run(one())
        clients[0] = None
        found.account.look()
        del dead  # it was still there at the look: whoever shuts it down has it
        asyncio.run(one())
        clients[0] = Client(address)
        asyncio.run(one())
        line = found.account.lines[2, 0]
    assert (sum(line.residence.counts), line.elsewhere) == (3 * timed, 3 - 3 * timed)


def test_a_slot_that_was_never_seen_filled_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of it is counted and not timed."""
    orchestrator = Made()
    orchestrator.stage_pools[2].clients[0] = None
    with fronted(orchestrator, monkeypatch) as found:
        found.account.look()
        assert (2, 0) not in found.account.lines
        assert not found.account.line(2, 0).is_on_this_host


def test_a_replica_that_comes_later_begins_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next look on, with what its stage is for; a client without a queue, a diffusion stage's, has no line."""
    orchestrator = Made()
    audio = orchestrator.stage_pools[2]
    client, audio.clients[0], audio.stage_client = audio.clients[0], None, None
    with fronted(orchestrator, monkeypatch) as found:
        from omni_fastpath.patches.queue_metrics import wrappers

        wrappers._accounts.append(found.account)
        found.account.look()
        assert not found.account.lines
        client.outputs_queue = asyncio.Queue()
        audio.clients[0] = audio.stage_client = client
        found.account.look()
        assert counts("residence_seconds") == counts("first_audio_residence_seconds") == {("2", "0"): 0}
        assert counts("first_text_residence_seconds") == {}


def test_a_queue_that_cannot_tell_has_no_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own monitor passes over it, too."""
    orchestrator = Made()

    def qsize() -> int:
        raise NotImplementedError

    for stage, queue in ((1, _Object(qsize=qsize)), (2, _Object(qsize=lambda: 3))):
        orchestrator.stage_pools[stage].clients[0].outputs_queue = queue
    with fronted(orchestrator, monkeypatch) as found:
        assert list(found.account.depths()) == [(2, 0, 3)]


# ---- Lag ----


class Loop:
    """An event loop that calls what is due when the test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, callback: Any) -> None:
        """Keep it."""
        self.due.append((delay_s, callback))


def test_lag_is_how_late_a_look_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, four times a second, and never below nothing; stopped, it looks no more."""
    with only("queue_metrics"):
        from omni_fastpath.patches.queue_metrics import lag

        now = [10.0]
        monkeypatch.setattr(lag, "monotonic", lambda: now[0])
        loop: Any = Loop()
        found = lag.Lag("front_end", loop)
        for late_s in (0.0, 0.04, -0.001):
            ((delay_s, look),) = loop.due
            loop.due.clear()
            now[0] += delay_s + late_s
            look()
        assert delay_s == 0.25
        assert found.seen.counts[0] == 2
        assert found.seen.sum == pytest.approx(0.04)
        found.stop()
        loop.due.pop()[1]()
        assert (sum(found.seen.counts), loop.due) == (3, [])


# ---- Stages ----


def task(*sizes: int) -> dict[str, Any]:
    """A save task with tensors of so many bytes."""
    import torch

    payload = {f"codes.{at}": torch.zeros(size, dtype=torch.uint8) for at, size in enumerate(sizes)}
    return {"request": object(), "multimodal_output": {"nested": [payload, 7, "text"]}, "is_finished": False}


def test_bytes_are_reckoned_from_a_sample() -> None:
    """Exactly where few wait, and in proportion where many do; clean-ups weigh nothing."""
    from omni_fastpath.patches.queue_metrics import saving

    assert saving.nbytes(deque()) == 0
    assert saving.nbytes(deque([task(100, 20), task(3), {"cleanup_shm": ["x"]}])) == 123
    assert saving.nbytes(deque([task(10)] * 10_000)) == 100_000
    assert saving.nbytes([task(10)]) is None
    assert saving.tasks(deque([1, 2])) == 2


def test_the_tasks_of_a_step_are_counted_each() -> None:
    """From 0.32 on a model may queue a scheduler step's tasks as one entry."""
    from omni_fastpath.patches.queue_metrics import saving

    queue = deque([{"batch": [task(100, 20), task(3)]}, task(5)])
    assert (saving.tasks(queue), saving.nbytes(queue)) == (3, 128)
    many = deque([{"batch": [task(10)] * 10}] * 1000)
    assert (saving.tasks(many), saving.nbytes(many)) == (10_000, 100_000)


@every_release
def test_a_stages_save_queue_is_shown() -> None:
    """In a stage's process nothing of the server is wrapped, and an adapter's queue is looked at while it lives."""
    from omni_fastpath import config
    from omni_fastpath.install import apply, seams_here, uninstall
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.patches.queue_metrics import PATCH
    from omni_fastpath.seams import find, is_ours

    with _adapter_class() as made:
        apply(config.resolve([], {"OMNI_FASTPATH_QUEUE_METRICS": "1"}, PATCHES), Process.STAGE)
        try:
            assert LEDGER.named("queue_metrics").state is State.APPLIED
            wrapped = {seam.qualname for seam in seams_here(PATCH) if is_ours(find(seam).raw())}
            assert wrapped == {"OmniTransferAdapterBase.__init__"}
            adapter = made()
            adapter._pending_save_reqs.append(task(5))
            tasks, nbytes = shown("save_queue_tasks"), shown("save_queue_bytes")
            assert [each["value"] for each in (*tasks.values(), *nbytes.values())] == [1, 5]
            assert LEDGER.named("queue_metrics").counters["observed"] == 1
            assert shown("residence_seconds") == {}
        finally:
            uninstall(PATCH)


@contextmanager
def _adapter_class() -> Iterator[Any]:
    """A maker of upstream's adapters without a connector, whose threads end with the block."""
    from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase

    made: list[Any] = []

    class Adapter(OmniTransferAdapterBase):  # type: ignore[misc]
        def save_loop(self) -> None:
            self.stop_event.wait(30)

        recv_loop = save_loop

    def make() -> Any:
        made.append(Adapter(None))
        return made[-1]

    try:
        yield make
    finally:
        for adapter in made:
            adapter.stop_event.set()
            threads: list[threading.Thread] = [adapter.save_thread, adapter.recv_thread]
            for thread in threads:
                thread.join()


# ---- Pauses ----


def test_pauses_of_full_collections_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collection of the oldest generation once, by the clock; young ones and one that had begun before are not."""
    with only("queue_metrics"):
        from omni_fastpath.patches.queue_metrics import pauses

        found = pauses.Pauses()
        times = iter((5, 5 + 3_000_000))
        monkeypatch.setattr(pauses, "perf_counter_ns", lambda: next(times))
        found("stop", {"generation": 2})
        for generation in (0, 2):
            found("start", {"generation": generation})
            found("stop", {"generation": generation})
        assert (sum(found.seen.counts), found.seen.sum) == (1, 0.003)


def test_pauses_of_an_api_process_are_shown() -> None:
    """From its orchestrator's beginning until the patch is taken off; then Python calls nothing of ours."""
    callbacks = list(gc.callbacks)
    with observed():
        assert counts("gc_pause_seconds") == {}
        run(filled(event_driven=False))
        before = counts("gc_pause_seconds")[()]
        gc.collect()
        assert counts("gc_pause_seconds")[()] == before + 1
    assert gc.callbacks == callbacks
