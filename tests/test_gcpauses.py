"""The oldest generation's pauses: what is counted, what it costs to look, and who looks."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from omni_fastpath import gcpauses
from omni_fastpath.gcpauses import BOUNDS_S, Pauses
from tests.fakes.processes import ROOT


@pytest.fixture
def pauses() -> Iterator[Pauses]:
    """One that watches this process."""
    found = Pauses()
    found.watch()
    yield found
    found.stop()
    assert found not in gc.callbacks


def counted(pauses: Pauses) -> int:
    """How many it has seen."""
    found = pauses.snapshot()
    assert found is not None
    return sum(found["counts"])


def test_the_oldest_generation_alone_is_counted(pauses: Pauses) -> None:
    """Automatic or asked for; young ones are not."""
    gc.collect(0)
    gc.collect(1)
    assert pauses.snapshot() == {"counts": [0] * (len(BOUNDS_S) + 1), "seconds": 0.0}
    gc.collect()
    assert counted(pauses) == 1
    before = gc.get_stats()[2]["collections"]
    kept: list[object] = []
    for _ in range(2_000_000):
        kept.append([kept])
        if counted(pauses) > 1:
            break
    assert counted(pauses) - 1 == gc.get_stats()[2]["collections"] - before == 1


def test_pauses_fall_into_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each into the first whose end it does not exceed, long ones into the last, and the sum is theirs."""
    pauses = Pauses()
    ends_ns = [round(each * 1e9) for each in BOUNDS_S]
    for took_ns in (1, *ends_ns, 60_000_000_000):
        times = iter((5, 5 + took_ns))
        monkeypatch.setattr(gcpauses, "perf_counter_ns", lambda times=times: next(times))
        pauses("start", {"generation": 2})
        pauses("stop", {"generation": 2})
    pauses("stop", {"generation": 2})  # began before we looked
    pauses.watch()
    found = pauses.snapshot()
    pauses.stop()
    assert found == {
        "counts": [2, *[1] * (len(BOUNDS_S) - 1), 1],
        "seconds": pytest.approx((1 + sum(ends_ns)) / 1e9 + 60),
    }


def test_watching_twice_counts_once(pauses: Pauses) -> None:
    """A server reads its deploy YAML four times."""
    pauses.watch()
    gc.collect()
    assert counted(pauses) == 1


def test_nobody_who_looks_is_nothing_known() -> None:
    """Without a look there is no figure, and nothing among Python's callbacks."""
    assert Pauses().snapshot() is None


SCRIPT = """
import gc, json, os, sys
sys.argv = json.loads(sys.argv[1])
from omni_fastpath import config, gcpauses
from omni_fastpath.activation import ACTIVATION
from omni_fastpath.patches import PATCHES
ACTIVATION.take_effect(config.resolve([], {"OMNI_FASTPATH": "0"}, PATCHES), None)
print(gcpauses.PAUSES in gc.callbacks)
"""


@pytest.mark.parametrize(
    ("arguments", "watched"),
    [
        (["vllm", "serve", "model", "--omni"], True),
        (["vllm", "serve", "model"], False),
        (["vllm", "serve", "model", "--omni", "--headless"], False),
        (["offline.py"], False),
        (["vllm", "bench", "serve", "--omni"], False),
    ],
)
def test_an_api_server_watches_and_nobody_else_does(arguments: list[str], watched: bool) -> None:
    """Where something of ours took effect in ``vllm serve --omni``; a script's process has no callback of ours."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split()[-1] == str(watched)
