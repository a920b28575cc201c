"""What is observed of queues: each raw output that is routed, by whichever loop, and nothing of upstream changed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import Process
from omni_fastpath.ledger import LEDGER
from tests.patches.content import sequences
from tests.patches.drive import only, run, stages

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

THINKER, TALKER, CODE2WAV = range(3)
DRAIN = ("nonblocking_dequeue", "budgeted_drain")


def shown(metric: str) -> dict[tuple[str, ...], Any]:
    """The samples of a metric now, by their labels' values."""
    record = LEDGER.snapshot()["queue_metrics"]
    found = record.get("figures", {}).get(f"omni_fastpath_{metric}", ())
    return {tuple(each["labels"].values()): each for each in found}


def counts(metric: str) -> dict[tuple[str, ...], int]:
    """How many observations a histogram has, by its labels' values."""
    return {labels: sum(each["counts"]) for labels, each in shown(metric).items()}


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
def test_what_is_routed_is_counted_and_sent_as_without_the_patch(event_driven: bool, others: tuple[str, ...]) -> None:
    """Each raw output once, in both of upstream's loops and under the drain; no message differs."""
    with only(*others):
        expected = sequences(run(filled(event_driven)))
    with only(*others, "queue_metrics"):
        assert sequences(run(filled(event_driven))) == expected
        routed = {THINKER: 5, TALKER: 4, CODE2WAV: 3}
        assert counts("residence_seconds") == {(str(n), str(at)): routed[n] for n in routed for at in range(2)}
        assert LEDGER.named("queue_metrics").counters["observed"] == 24


@every_release
def test_depth_is_what_waits_now() -> None:
    """Of each replica from the start on, and of none when the orchestrator is gone; what was counted stays."""
    with only("queue_metrics"):
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
    assert depth == {(str(stage), str(at)): 0 for stage in range(3) for at in range(2)}
    assert later == {**depth, ("1", "1"): 1}


# ---- One orchestrator's account ----


class _Object(SimpleNamespace):
    """One that can be weakly referred to, and be in a set."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Client(SimpleNamespace):
    """One whose socket listens on an address."""

    def __init__(self, address: bytes, **resources: Any) -> None:
        socket = SimpleNamespace(LAST_ENDPOINT=address)
        super().__init__(resources=SimpleNamespace(output_socket=socket, **resources))


def pool(gives: str | None) -> Any:
    """A pool with one replica in this process."""
    return _Object(
        clients=[_Object(final_output_type=gives, outputs_queue=asyncio.Queue())],
        final_output=gives is not None,
        _audio_frames_by_request={},
        _non_empty_first_output_timestamps_by_request={},
    )


class Script:
    """Calls an account as the wrappers do, by a clock of its own; stage 0 gives text, 1 nothing, 2 audio."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from omni_fastpath.patches.queue_metrics import account

        self.now_s = 100.0
        monkeypatch.setattr(account, "monotonic", lambda: self.now_s)
        self.orchestrator = _Object(stage_pools=[pool("text"), pool(None), pool("audio")])
        self.made: list[tuple[Any, ...]] = []
        journey: Any = SimpleNamespace(note_made=lambda *made: self.made.append(made))
        self.counters = {"observed": 0}
        self.account = account.Account(self.orchestrator, {"a": journey, "b": journey}, self.counters)

    def one(self, stage: int, made_s: float = 99.0, first: str = "", nested: int = -1) -> None:
        """One raw output, in whose processing a request may have a first, and another stage's output be routed."""
        processed = self.account.processing(stage, 0, SimpleNamespace(timestamp=made_s, outputs=[]), set())
        assert nested < 0 or self.account.routing(nested, 0, []) is None
        if first:
            stages = self.orchestrator.stage_pools[stage]
            stages._audio_frames_by_request[first] = stages._non_empty_first_output_timestamps_by_request[first] = 1
        assert processed is not None
        processed()
        routed = self.account.routing(stage, 0, outputs=[])
        assert routed is not None
        routed()

    def seen(self, stage: int) -> tuple[int, float]:
        """How many raw outputs of a stage were timed, and their seconds."""
        residence = shown("residence_seconds")[str(stage), "0"]
        return sum(residence["counts"]), residence["sum"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """One of an account that is not any server's."""
    with only("queue_metrics"):
        yield Script(monkeypatch)


def test_who_enters_upstreams_record_has_a_first(script: Script) -> None:
    """A raw output in whose processing a followed request had its first audio, or text, is one; no other is."""
    for stage in range(3):
        for first in ("a", "", "b", "not followed"):
            script.one(stage, first=first)
    assert [script.seen(stage) for stage in range(3)] == [(4, 4.0)] * 3
    assert [made[:3] for made in script.made] == [
        (output, stage, (99.0, 100.0)) for output, stage in (("text", 0), ("audio", 2)) for _ in "ab"
    ]
    assert script.counters["observed"] == 12


def test_what_was_dequeued_since_it_was_made_was_ahead_of_it(script: Script) -> None:
    """Of its own replica, as a queue is first in, first out."""
    for now_s, made_s, first in ((100.0, 99.0, ""), (101.0, 99.5, ""), (102.0, 100.5, "a"), (103.0, 102.5, "b")):
        script.now_s = now_s
        script.one(2, made_s, first)
        script.one(0, made_s)
    assert [made[3] for made in script.made] == [1, 0]


@pytest.mark.parametrize("nested", [1, 2], ids=["of its own stage", "of another"])
def test_what_is_routed_in_a_raw_outputs_processing_belongs_to_it(script: Script, nested: int) -> None:
    """0.32 routes a first audio while it processes what carried it: one raw output, timed when that is routed."""
    script.one(1, 98.0, nested=nested)
    assert script.seen(1) == (1, 2.0)
    assert script.counters["observed"] == 1


def test_what_was_not_processed_is_not_counted(script: Script) -> None:
    """Neither a raw output whose processing raised, nor a diffusion stage's output behind it; nor a dead replica's."""
    raw = SimpleNamespace(timestamp=99.0, outputs=[])
    script.account.processing(2, 0, raw, set())
    assert script.account.routing(2, 0, []) is None
    processed = script.account.processing(2, 0, raw, set())
    assert processed is not None
    processed()
    assert script.account.routing(1, 0, []) is None
    script.orchestrator.stage_pools[2].clients[0] = None
    assert script.account.processing(2, 0, raw, set()) is None


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        pytest.param(_Object(), True, id="in this process"),
        pytest.param(Client(b"ipc:///tmp/x"), True, id="ipc"),
        pytest.param(Client(b"tcp://10.0.0.1:5555"), False, id="a network"),
        pytest.param(Client(b"tcp://10.0.0.1:5555", engine_manager=None), False, id="attached"),
        pytest.param(Client(b"tcp://10.0.0.1:5555", engine_manager=object()), True, id="spawned here"),
    ],
)
def test_whose_clock_is_ours(client: Any, expected: bool) -> None:
    """Only where a replica runs on this host its time of construction says something here."""
    from omni_fastpath.patches.queue_metrics.account import is_on_this_host

    assert is_on_this_host(client) is expected


# ---- Delays of a process ----


def test_lag_is_how_late_a_timer_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, four times a second, and never below nothing; a loop that is no longer known is not measured."""
    due: list[Any] = []
    loop: Any = _Object(call_later=lambda *what: due.append(what))
    now = [10.0]
    with only("queue_metrics"):
        from omni_fastpath.patches.queue_metrics import delays

        monkeypatch.setattr(delays, "monotonic", lambda: now[0])
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        delays.measure_lag("front_end")
        delays.measure_lag("front_end")
        for late_s in (0.0, 0.04, -0.001):
            [(delay_s, call, *given)] = due
            due.clear()
            now[0] += delay_s + late_s
            call(*given)
        found = shown("event_loop_lag_seconds")[("front_end",)]
        assert (delay_s, sum(found["counts"]), found["counts"][0]) == (0.25, 3, 2)
        assert found["sum"] == pytest.approx(0.04)
        delays.LOOPS.clear()
        _, call, *given = due.pop()
        call(*given)
        assert (counts("event_loop_lag_seconds")[("front_end",)], due) == (3, [])


def test_pauses_of_full_collections_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collection of the oldest generation once, by the clock; young ones and one that had begun before are not."""
    with only("queue_metrics"):
        from omni_fastpath.patches.queue_metrics import delays

        found = delays.Pauses()
        times = iter((5, 5 + 3_000_000))
        monkeypatch.setattr(delays, "perf_counter_ns", lambda: next(times))
        found("stop", {"generation": 2})
        for generation in (0, 2):
            found("start", {"generation": generation})
            found("stop", {"generation": generation})
        assert counts("gc_pause_seconds") == {(): 1}
        assert shown("gc_pause_seconds")[()]["sum"] == 0.003


@every_release
def test_the_api_processs_delays_are_shown() -> None:
    """Pauses and the orchestrator's lag from its beginning on, the front end's from its first request on."""
    callbacks = list(gc.callbacks)
    with only("queue_metrics"):
        import janus

        from omni_fastpath.patches.queue_metrics import wrappers

        run(filled(event_driven=False))
        before = counts("gc_pause_seconds")[()]
        gc.collect()
        assert counts("gc_pause_seconds")[()] == before + 1
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",)}

        async def front_end() -> None:
            instance = SimpleNamespace(engine=SimpleNamespace(output_queue=janus.Queue()))
            for _ in range(2):
                wrappers.wrapped_final_output_handler(lambda: None, instance, (), {})
            assert set(shown("queued_messages")) == {()}

        asyncio.run(front_end())
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",), ("front_end",)}
    assert gc.callbacks == callbacks


# ---- Stages ----


@every_release
def test_a_stages_save_queue_is_shown() -> None:
    """In a stage nothing of the server is wrapped; of a step's batch (0.32) each task counts."""
    from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase

    from omni_fastpath.seams import find, is_ours
    from tests.fakes.upstream import seams_here

    class Adapter(OmniTransferAdapterBase):  # type: ignore[misc]
        def save_loop(self) -> None:
            self.stop_event.wait(30)

        recv_loop = save_loop

    with only("queue_metrics", process=Process.STAGE) as entry:
        wrapped = {seam.qualname for seam in seams_here(entry.patch) if is_ours(find(seam).raw())}
        assert wrapped == {"OmniTransferAdapterBase.__init__"}
        adapter = Adapter(None)
        adapter._pending_save_reqs.extend([{"request": 1}, {"batch": [{"request": 2}, {"request": 3}]}])
        assert [each["value"] for each in shown("save_queue_tasks").values()] == [3]
        assert entry.counters["observed"] == 1
        assert shown("residence_seconds") == {}
    adapter.stop_event.set()
    adapter.save_thread.join()
    adapter.recv_thread.join()
