"""The orchestrator that is far ahead of its reader: lends to one that reads, waits for none that does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from omni_fastpath.patches.budgeted_drain import pace
from omni_fastpath.patches.budgeted_drain.pace import AHEAD, AT_ONCE_NS, LOAN_NS, PAY_BACK, Pace

MICROSECOND = 1_000


class _Machine:
    """A queue of some depth, a clock that only sleep moves, and a reader that reads so many messages in each loan."""

    def __init__(self, depth: int, reads: int) -> None:
        self.depth, self.reads, self.now_ns, self.loans = depth, reads, 0, 0
        self.counters = {"lent": 0, "lent_in_vain": 0}
        self.pace = Pace(self, self.counters, self.sleep, lambda: self.now_ns)

    def qsize(self) -> int:
        return self.depth

    def sleep(self, seconds: float) -> None:
        self.loans += 1
        self.now_ns += round(seconds * 1e9)
        self.depth -= min(self.reads, self.depth)

    async def keep(self) -> None:
        """As the loop does after its yield."""
        if self.pace.is_far_ahead():
            await self.pace.let_catch_up()


async def test_a_reader_that_keeps_up_is_lent_nothing() -> None:
    """Below the mark nothing happens, and the clock is not even looked at."""
    machine = _Machine(AHEAD - 1, 1)
    await machine.keep()
    assert machine.counters == {"lent": 0, "lent_in_vain": 0}
    assert machine.loans == 0


async def test_a_reader_that_reads_is_lent_to_until_it_has_caught_up() -> None:
    """One loan after the other, and none more once less than the mark waits."""
    machine = _Machine(AHEAD + 20, 8)
    await machine.keep()
    assert machine.depth == AHEAD - 4
    assert machine.counters == {"lent": 3, "lent_in_vain": 0}


async def test_a_reader_that_never_catches_up_has_its_time_and_no_more() -> None:
    """Dispatch goes on after the longest stand, however far behind the reader is."""
    machine = _Machine(10**9, 1)
    await machine.keep()
    assert machine.now_ns == AT_ONCE_NS
    assert machine.counters["lent"] == AT_ONCE_NS // LOAN_NS


async def test_a_reader_that_does_not_read_costs_a_small_share_of_the_time() -> None:
    """Loans in vain are paid back: of a second of work, looked at each 100 microseconds, they take a small part."""
    machine = _Machine(10 * AHEAD, 0)
    worked_ns = 0
    while worked_ns < 1_000_000_000:
        await machine.keep()
        machine.now_ns += 100 * MICROSECOND
        worked_ns += 100 * MICROSECOND
    assert machine.counters["lent"] == 0
    assert 0 < (machine.loans - 1) * LOAN_NS <= worked_ns / PAY_BACK  # the first is lent before any work
    machine.reads = AHEAD  # it reads again
    machine.now_ns += PAY_BACK * LOAN_NS
    await machine.keep()
    assert machine.depth < AHEAD


@pytest.mark.parametrize("queue", [object(), "no queue"])
async def test_a_queue_without_a_depth_is_never_lent_to(queue: Any) -> None:
    """Somebody else's queue object."""
    assert not Pace(queue, {}).is_far_ahead()


async def test_a_queue_that_raises_ends_the_loans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Told once, in words."""

    class Broken:
        def qsize(self) -> int:
            raise OSError("gone")

    broken = Pace(Broken(), {})
    assert not broken.is_far_ahead()
    assert not broken.is_far_ahead()
    assert caplog.text.count("does not say how deep it is") == 1


# ---- In the real orchestrator ----


def _pipeline(event_driven: bool, raw_outputs: int, entries: int) -> Any:
    from benchmarks.rigs.inprocess import Pipeline, batch, text

    pipeline = Pipeline(event_driven=event_driven)
    names = [f"r{number}" for number in range(entries)]
    for name in names:
        pipeline.add_request(name)
    pipeline.put(0, *(batch(*(text(name, number) for name in names)) for number in range(raw_outputs)))
    return pipeline


@pytest.mark.upstream
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event"])
def test_the_orchestrator_gets_no_further_ahead_than_the_mark_and_one_raw_output(
    event_driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reader that reads in the loans and at no other time, its queue never holds more."""
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches.budgeted_drain import drain, pauses

    pipeline = _pipeline(event_driven, raw_outputs=100, entries=16)
    read: list[Any] = []
    deepest = 0

    def reader(_seconds: float) -> None:
        nonlocal deepest
        deepest = max(deepest, pipeline.outputs.sync_q.qsize())
        read.extend(pipeline.messages())

    monkeypatch.setattr(pauses, "Pace", partial(Pace, sleep=reader))
    monkeypatch.setattr(drain, "_YIELD_AFTER_NS", 0)  # after each raw output, on the fastest machine too
    with pipeline:
        pipeline.settle()
    read.extend(pipeline.messages())
    assert len(read) == 1600
    assert AHEAD <= deepest < AHEAD + 16
    counters = LEDGER.named("budgeted_drain").counters
    assert counters["lent"] >= 1600 // (AHEAD + 16) - 1
    assert counters["lent_in_vain"] == 0


@pytest.mark.upstream
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event"])
def test_a_reader_that_is_gone_holds_nothing_up(event_driven: bool) -> None:
    """Nobody reads: everything is dispatched all the same, in order, and the orchestrator shuts down."""
    from omni_fastpath.ledger import LEDGER

    pipeline = _pipeline(event_driven, raw_outputs=60, entries=8)
    with pipeline:
        pipeline.settle()
    assert pipeline.crash is None
    found: dict[str, list[int]] = {}
    for message in pipeline.messages():
        found.setdefault(message.request_id, []).extend(message.engine_outputs.outputs[0].token_ids)
    assert found == {f"r{number}": list(range(60)) for number in range(8)}
    assert LEDGER.named("budgeted_drain").counters["lent"] == 0


def test_the_constants_keep_their_promise() -> None:
    """What the docstrings say of them."""
    assert 1 / PAY_BACK < 0.04
    assert pace.AT_ONCE_NS <= 10_000_000


async def test_a_queue_that_stops_saying_how_deep_it_is() -> None:
    """Somebody else's queue that fails in the middle of a loan ends neither the loop nor the loan."""
    machine = _Machine(2 * AHEAD, 1)

    def fails() -> int:
        if machine.loans:
            raise RuntimeError("closed")
        return machine.depth

    machine.pace._depth = fails
    await machine.keep()
    assert machine.loans == 1
    assert not machine.pace.is_far_ahead()
