"""The metrics of queues and delays: what is counted, and that no message changes."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, front_end, silent, text, without_orchestrator
from omni_fastpath import threads
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.queue_metrics import histograms, wrappers
from omni_fastpath.patches.queue_metrics.account import is_on_this_host
from tests.patches.content import sequences
from tests.patches.drive import front_end_takes, only, run, stages
from tests.schedules.virtual_time import VirtualLoop

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


def filled(event_driven: bool, replicas: int = 2, kind: str = "DELTA", *, ends: bool = False) -> Any:
    """A pipeline whose queues are filled before it runs: two requests, each on a replica of its own."""
    pipeline = Pipeline(stages(replicas), event_driven=event_driven)
    for replica, name in enumerate(("one", "two")):
        at = replica % replicas
        pipeline.add_request(name, RequestOutputKind[kind], replicas=(at, at, at))
        last = FinishReason.STOP if ends else None
        pipeline.put(THINKER, *(batch(text(name, n, finish=last if n == 4 else None)) for n in range(5)), replica_id=at)
        pipeline.put(TALKER, *(batch(codes(name, last if n == 3 else None)) for n in range(4)), replica_id=at)
        heard = audio(name, 1.0), audio(name, 2.0, finish=last)
        pipeline.put(CODE2WAV, *map(batch, (silent(name), *heard)), replica_id=at)
    return pipeline


# ---- In the real orchestrator ----


@every_release
@pytest.mark.parametrize("others", [(), DRAIN], ids=["upstream's loop", "drain"])
def test_what_is_routed_is_counted_and_sent_as_without_the_patch(event_driven: bool, others: tuple[str, ...]) -> None:
    """Each raw output counts once, in both loops of upstream and in the drain, and no message differs."""
    with only(*others):
        expected = sequences(run(filled(event_driven)))
    with only(*others, "queue_metrics"):
        assert sequences(run(filled(event_driven))) == expected
        routed = {THINKER: 5, TALKER: 4, CODE2WAV: 3}
        assert counts("residence_seconds") == {(str(n), str(at)): routed[n] for n in routed for at in range(2)}
        assert LEDGER.named("queue_metrics").counters["observed"] == 24


@every_release
def test_depth_is_what_is_queued_now() -> None:
    """Depths are shown from the start on and not after the orchestrator is gone, with its account; counts are kept."""
    with only("queue_metrics"):
        pipeline = filled(event_driven=False)
        with pipeline:
            pipeline.settle()
            assert [each["value"] for each in shown("queued_raw_outputs").values()] == [0] * 6
        pipeline.put(TALKER, "never taken", replica_id=1)
        depth = {labels: each["value"] for labels, each in shown("queued_raw_outputs").items()}
        del pipeline
        gc.collect()
        assert shown("queued_raw_outputs") == {}
        assert [account() for account in wrappers._accounts] == [None]
        assert sum(counts("residence_seconds").values()) == 24
    assert depth == {(str(stage), str(at)): (stage, at) == (1, 1) for stage in range(3) for at in range(2)}


# ---- One orchestrator's account ----


def client(address: bytes, **resources: Any) -> Any:
    """A client whose socket listens on an address."""
    return SimpleNamespace(resources=SimpleNamespace(output_socket=SimpleNamespace(LAST_ENDPOINT=address), **resources))


def test_which_clocks_can_be_compared() -> None:
    """The time of construction is used only if the replica runs on this host: local, by ipc or spawned here."""
    network = b"tcp://10.0.0.1:5555"
    assert all(map(is_on_this_host, (object(), client(b"ipc:///tmp/x"), client(network, engine_manager=object()))))
    assert not any(map(is_on_this_host, (client(network), client(network, engine_manager=None))))


# ---- Delays of a process ----


def test_lag_is_how_late_a_timer_was() -> None:
    """Four times per second, once per event loop; a loop that is no longer known is not measured."""
    with only("queue_metrics"):
        loop = VirtualLoop()
        for _ in range(2):
            loop.call_soon(wrappers.measure_lag, "front_end")
        loop.call_later(0.45, loop.spend, 0.09)  # the second timer is 40 ms late
        loop.go_on(0.6)
        found = shown("event_loop_lag_seconds")[("front_end",)]
        assert (sum(found["counts"]), found["counts"][0]) == (2, 1)
        assert found["sum"] == pytest.approx(0.04, abs=0.001)
        wrappers._loops.clear()
        loop.go_on(1.0)
        assert counts("event_loop_lag_seconds")[("front_end",)] == 2
        loop.close()


@every_release
def test_the_api_processs_delays_are_shown() -> None:
    """The orchestrator's lag is shown from its start on, the front end's lag from its first request on."""

    async def served() -> None:
        found = front_end(without_orchestrator(), {}, event_driven=False)
        for _ in range(2):
            found._final_output_handler()
        assert set(shown("queued_messages")) == {()}
        found.final_output_task.cancel()

    with only("queue_metrics"):
        run(filled(event_driven=False))
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",)}
        asyncio.run(served())
        assert set(shown("event_loop_lag_seconds")) == {("orchestrator",), ("front_end",)}


@every_release
def test_the_front_ends_thread_is_the_one_that_drains(event_driven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an actor, whose main thread has nothing to do with the engine."""
    monkeypatch.setattr(threads, "_named", {})

    def served() -> int | None:
        assert asyncio.run(front_end_takes(3, event_driven=event_driven)) == [0, 1, 2]
        assert threads.own()["front_end"] == threading.get_native_id()
        return threading.get_native_id()

    with only("queue_metrics"), ThreadPoolExecutor(1) as actor:
        assert actor.submit(served).result(60) != threading.main_thread().native_id


# ---- Histograms ----


def test_a_sample_has_what_was_counted_and_what_was_there_some_minutes_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that equals a bound is in its bucket. ``before`` is five to ten minutes old, however often it is read."""
    now = [0.0]
    monkeypatch.setattr(histograms, "monotonic", lambda: now[0])
    found = histograms.Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        found.observe(value)
    assert found.sample({"loop": "one"}) == {
        "labels": {"loop": "one"},
        "counts": [2, 2, 1],
        "sum": 7.5,
        "before": [0] * 3,
    }
    ages = []
    for _ in range(400):
        now[0] += 4
        ages.append(now[0] / 4 + 5 - sum(found.sample({})["before"]))
        found.observe(0.5)
    assert all(75 <= age <= 151 for age in ages[151:])
