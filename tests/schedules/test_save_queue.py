"""A hypothesis state machine for ``save_queue_cap``: the same schedule on the patch and on stock.

Real are upstream's scheduler (both), adapter, ``save_loop`` and shared memory; time is the schedule's, and one thread
runs at a time (`save_thread`). Requests come, are aborted, preempted, fetched or not; sends last, fail,
return false; the two threads change places between any two lines of the patch. The model
(`save_stage`) says what must be true of the patch at each event; then stock gets the same events. Holds move steps
apart, so that streams are compared, never times.

    python -m pytest tests/schedules/test_save_queue.py --hypothesis-profile long -s
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from omni_fastpath.declare import Process
from tests.patches.drive import only, silent
from tests.patches.small_stage import stage_config
from tests.schedules.save_thread import Cut

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(7200)]

MOST_REQUESTS = 6
SMALL = 4
"""Blocks of a KV cache with which requests are preempted."""

STREAMS = st.integers(0, MOST_REQUESTS - 1)
SECONDS = st.sampled_from([0.0] * 9 + [0.005, 0.05, 3.0])
CUTS = st.none() | st.builds(Cut, line=st.integers(1, 60), turns=st.sampled_from([1, 1, 3]))
OPTIONS = st.fixed_dictionaries(
    {
        "max_bytes": st.sampled_from([None, 2**16]),
        "max_tasks": st.sampled_from([None, 1, 4]),
        "max_hold_s": st.sampled_from([0.05, 5.0, 3600.0]),
    }
)


def differences(stock: Any, ours: Any) -> Iterator[str]:
    """What the patch changed for a stream; where a client left, one arm's begins the other's."""
    for name in stock.names():
        stream, is_cut = stock.stream(name), name in stock.aborted | ours.aborted
        pairs = [(stock.tokens(name), ours.tokens(name))]
        # Upstream sends what is computed again after a preemption otherwise cut, or not at all.
        if name not in stock.preempted | ours.preempted:
            pairs.append((stock.chunks[stream], ours.chunks[stream]))
            if not is_cut:
                pairs += [(stock.said(name), ours.said(name)), (stock.rest[name], ours.rest[name])]
        for one, other in pairs:
            if other[: len(one)] != one[: len(other)] or not (is_cut or len(one) == len(other)):
                yield f"{name}: {other} instead of {one}"
        for arm in (stock, ours):
            if any(is_last for *_, is_last in arm.chunks[stream][:-1]):
                yield f"{name} goes on after its end: {arm.chunks[stream]}"


class Schedule(RuleBasedStateMachine):
    """One schedule; played on the patch while it is drawn, and on stock at its end."""

    config: ClassVar[Any] = None
    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._stack, self._script = ExitStack(), list[tuple[Any, ...]]()
        self._requests = 0

    @initialize(
        asynchronous=st.booleans(),
        device=st.sampled_from(["cpu", "cuda"]),
        blocks=st.sampled_from([4096, SMALL]),
        is_counted=st.sampled_from([True, True, False]),
        options=OPTIONS,
    )
    def _begin(self, *, options: dict[str, Any], **shape: Any) -> None:
        enter = self._stack.enter_context
        self._entry = enter(only("forward_gate", "save_queue_cap", process=Process.STAGE, **options))
        from omni_fastpath.patches.save_queue_cap import save_queue, wrappers  # once it is installed
        from tests.schedules.save_stage import Clock, Shape, Stage

        self._shape, clock = Shape(options=options, **shape), Clock()
        enter(mock.patch.object(save_queue, "time", clock))
        enter(mock.patch.object(wrappers, "time", clock))
        self._ours = enter(Stage(self.config, self._shape, clock))
        assert self._ours.is_ours, self._entry.reason

    def _do(self, what: str, *given: Any) -> None:
        self._script.append((what, *given))
        getattr(self._ours, what)(*given)
        self._ours.look()

    @precondition(lambda self: self._requests < MOST_REQUESTS)
    @rule(
        tokens=st.integers(1, 30),
        failing=st.just({}) | st.dictionaries(st.integers(0, 12), st.sampled_from(["is false", "raises"]), max_size=2),
        slow_s=st.sampled_from([0.0, 0.0, 0.2]),
        is_fetched=st.booleans(),
    )
    def _arrive(self, tokens: int, failing: dict[int, str], slow_s: float, *, is_fetched: bool) -> None:
        self._requests += 1
        self._do("arrive", f"s{self._requests - 1}", tokens, failing, slow_s, is_fetched)

    @rule(count=st.integers(1, 20), cut=CUTS)
    def _steps(self, count: int, cut: Any) -> None:
        self._do("steps", count, cut)

    @rule(seconds=st.lists(SECONDS, min_size=1, max_size=8), cut=CUTS)
    def _sends(self, seconds: list[float], cut: Any) -> None:
        self._do("sends", seconds, cut)

    @rule(seconds=st.sampled_from([0.03, 1.5, 70.0]))
    def _wait(self, seconds: float) -> None:
        self._do("wait", seconds)

    @precondition(lambda self: 3 * len(self._ours.aborted) < self._requests)
    @rule(number=STREAMS)
    def _leave(self, number: int) -> None:
        self._do("leave", f"s{number % self._requests}")

    @precondition(lambda self: self._requests)
    @rule(number=STREAMS, count=st.integers(1, 20))
    def _fetch(self, number: int, count: int) -> None:
        self._do("fetch", f"s{number % self._requests}", count)

    def teardown(self) -> None:
        """Let both arms come to their end, and compare."""
        from tests.schedules.save_stage import Clock, Stage

        failed = sys.exc_info()[0] is not None or not self._script
        with self._stack:
            if not failed:
                self._ours.settle()
        if failed:
            return
        with Stage(self.config, self._shape, Clock()) as stock:
            for what, *given in self._script:
                getattr(stock, what)(*given)
            stock.settle()
        self._count()
        assert not stock.is_ours
        wrong = list(differences(stock, self._ours))
        assert not wrong, wrong

    def _count(self) -> None:
        ours, seen = self._ours, self._entry.counters
        self.counts.update({name: seen[name] for name in ("holds", "expired_holds", "slow_sends")})
        self.counts.update({"aborted": len(ours.aborted), "preempted": len(ours.preempted), "cuts": ours.cuts})


def test_every_schedule_is_stocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is lost, doubled or reordered, no hold is too long, and each stream is stock's."""
    Schedule.config = stage_config(tmp_path_factory.mktemp("model"))
    Schedule.counts.clear()
    try:
        with silent():
            run_state_machine_as_test(Schedule, settings=settings(suppress_health_check=list(HealthCheck)))
    finally:
        print(dict(sorted(Schedule.counts.items())))  # noqa: T201
    assert all(Schedule.counts.values()), Schedule.counts
