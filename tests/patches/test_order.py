"""Which stage is served next: the built-in orders, a plugin's choice, and the floors."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.hooks import BacklogView
from omni_fastpath.patches.budgeted_drain.order import WINDOW_NS, Order, floor_of
from omni_fastpath.patches.budgeted_drain.replicas import Stage
from tests.patches.drive import queued_replica

ORDERS = ("stage_order", "downstream_first", "visible_first")


def stage(stage_id: int, waiting: int = 0, *, seen: bool = True, replicas: int = 1) -> Stage:
    """A stage of replicas with so many queued items each."""
    made = Stage(stage_id, SimpleNamespace(final_output=seen))
    for replica_id in range(replicas):
        queued_replica(made, *(f"{stage_id}.{replica_id}.{n}" for n in range(waiting)), replica_id=replica_id)
    return made


def ordered(order: str, *members: Stage, floor: float = 0.0, ask: Any = None) -> Order:
    """An order that knows these stages."""
    return Order(order, floor, ask, {}, members)


# ---- The built-in orders ----


@pytest.mark.parametrize(
    ("order", "passes"),
    [
        ("stage_order", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("downstream_first", [3, 3, 2, 2, 1, 1, 0, 0]),
        ("visible_first", [3, 3, 0, 0, 2, 2, 1, 1]),
    ],
)
def test_order_of_stages(order: str, passes: list[int]) -> None:
    """The order of passes while all stages have a backlog, where stages 0 and 3 have final outputs."""
    members = [stage(n, 2, seen=n in (0, 3)) for n in range(4)]
    served = serve(ordered(order, *members), dict.fromkeys(range(4), lambda: 0.0), 1.0)
    assert [stage_id for _, stage_id, _ in served] == passes


def test_stage_with_queued_first_audio_ranks_as_final_output() -> None:
    """Until the raw output that brings it is taken."""
    talker = Stage(1, SimpleNamespace(final_output=False), "first")
    entries: list[Any] = [SimpleNamespace(multimodal_output={key: 1}) for key in ("codes", "first", "codes")]
    queued_replica(talker, *(SimpleNamespace(outputs=[entry]) for entry in entries))
    made = ordered("visible_first", stage(0, 3), talker, stage(2, 1))
    found = []
    while (decision := made.decide()) is not None:
        replica = decision.stage.take_turn()
        assert replica is not None
        replica.dequeue()
        replica.follow_queue()
        made.pass_ended(decision)
        found.append(decision.stage.stage_id)
    assert found == [2, 1, 1, 0, 0, 0, 1]


def test_turn_ends_only_when_the_pass_does() -> None:
    """After a yield the stage whose turn it is continues although another one got an output; a fixed order moves on."""
    low, high = stage(0, 2), stage(1)
    for order, expected in (("stage_order", True), ("downstream_first", False)):
        made = ordered(order, low, high)
        assert made.decide() == (low, False, False)
        high.replicas[0].waiting.append("new")
        assert [made.decide(low) == (low, False, True) for _ in range(2)] == [expected] * 2
        high.replicas[0].waiting.clear()


def test_replicas_take_turns() -> None:
    """The replicas of a stage are served in rotation, without those whose queue is empty."""
    member = stage(0, 2, replicas=3)
    member.replicas[1].waiting.clear()
    taken = []
    while (replica := member.take_turn()) is not None:
        taken.append(replica.waiting.popleft())
    assert taken == ["0.0.0", "0.2.0", "0.0.1", "0.2.1"]


# ---- A plugin's choice ----


def test_plugin_is_asked_only_when_contested() -> None:
    """With one backlog the plugin is not asked; with two it sees both, and its answer is obeyed."""
    asked: list[BacklogView] = []

    def ask(view: BacklogView) -> int:
        asked.append(view)
        return 0

    low, high = stage(0, 1, replicas=2), stage(1)
    made = ordered("downstream_first", low, high, ask=ask)
    assert made.decide() == (low, False, False)
    assert asked == []
    high.replicas[0].waiting.append("new")
    assert made.decide() == (low, False, True)
    assert [{key: [list(each) for each in value] for key, value in view.waiting.items()} for view in asked] == [
        {0: [["0.0.0"], ["0.1.0"]], 1: [["new"]]}
    ]


@pytest.mark.parametrize("answer", [None, 2, 9, -1, "two", [1]])
def test_answer_without_a_backlog_is_ignored(answer: Any) -> None:
    """After an id without a backlog, anything else than an id, or None, the built-in order decides."""
    made = ordered("downstream_first", stage(0, 1), stage(1, 1), stage(2), ask=lambda _view: answer)
    decision = made.decide()
    assert decision is not None
    assert decision.stage.stage_id == 1


# ---- Floors ----

Items = Callable[[], float]
CHEAP, SLOW = 100_000.0, 20_000_000.0  # nanoseconds
WINDOW = 1_000_000_000.0


def serve(
    order: Order, costs: dict[int, Items], until_ns: float, arrivals: Callable[[float], None] = lambda _now: None
) -> list[tuple[float, int, float]]:
    """Serve as the loop does for so much processing time; the end, stage and cost of each item."""
    now, served = 0.0, []
    while now < until_ns:
        arrivals(now)
        decision = order.decide()
        if decision is None:
            break
        stage = decision.stage
        cost = costs[stage.stage_id]()
        now += cost
        replica = stage.take_turn()
        assert replica is not None
        replica.waiting.popleft()
        order.charge(stage, int(cost))
        order.pass_ended(decision)
        served.append((now, stage.stage_id, cost))
    return served


def got(served: list[tuple[float, int, float]], stage_id: int, begin: float, end: float) -> float:
    """Processing time of a stage between two points."""
    return sum(max(0.0, min(now, end) - max(now - cost, begin)) for now, owner, cost in served if owner == stage_id)


def endless(*members: Stage) -> Callable[[float], None]:
    """Arrivals that keep a backlog at these stages."""

    def arrive(_now: float) -> None:
        for member in members:
            if not member.has_backlog():
                member.replicas[0].waiting.append("more")

    return arrive


def test_one_very_slow_raw_output_does_not_cost_a_stage_its_floor_for_long() -> None:
    """A stage whose raw output took half a second is served again within each window of ``WINDOW_NS`` of processing."""
    low, high = stage(0, 1), stage(1, 1)
    costs = iter([500e6])
    served = serve(
        ordered("downstream_first", low, high, floor=0.1),
        {0: lambda: next(costs, CHEAP), 1: lambda: CHEAP},
        2 * WINDOW,
        endless(low, high),
    )
    ends = [now for now, owner, _ in served if owner == 0]
    assert max(served, key=lambda each: each[2])[1] == 0
    assert max(after - before for before, after in pairwise(ends)) <= WINDOW_NS + 2 * CHEAP


def test_oscillating_stage_does_not_save_up() -> None:
    """A stage with single slow raw outputs and idle times in between gets at most its floor and one raw output."""
    low, high = stage(0), stage(1, 1)
    rng = random.Random(7)
    next_arrival = 0.0

    def arrive(now: float) -> None:
        nonlocal next_arrival
        endless(high)(now)
        if not low.has_backlog() and now >= next_arrival:
            low.replicas[0].waiting.append("slow")
            next_arrival = now + rng.choice((0.0, 50e6, 1e9))

    served = serve(
        ordered("downstream_first", low, high, floor=0.1), {0: lambda: SLOW, 1: lambda: CHEAP}, 6 * WINDOW, arrive
    )
    assert any(owner == 0 for _, owner, _ in served)
    for begin in range(0, int(5 * WINDOW), int(WINDOW / 4)):
        assert got(served, 0, begin, begin + WINDOW) <= 0.1 * WINDOW + SLOW


def test_idle_stages_give_their_share_away() -> None:
    """The only stage with a backlog gets all of the time, and is not penalised for it afterwards."""
    low, high = stage(0, 1), stage(1)
    made = ordered("downstream_first", low, high, floor=0.1)
    served = serve(made, {0: lambda: CHEAP, 1: lambda: CHEAP}, WINDOW, endless(low))
    assert {owner for _, owner, _ in served} == {0}
    served = serve(made, {0: lambda: CHEAP, 1: lambda: CHEAP}, WINDOW, endless(low, high))
    assert got(served, 0, 0, WINDOW / 50) >= 0.1 * WINDOW / 50 - CHEAP - 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("preferred", range(3))
def test_floors_hold_whatever_a_plugin_says(order: str, preferred: int) -> None:
    """If a plugin always prefers one stage, the other stages still get their floors."""
    members = [stage(n, 1, seen=n != 1) for n in range(3)]
    made = ordered(order, *members, floor=0.1, ask=lambda _view: preferred)
    served = serve(made, dict.fromkeys(range(3), lambda: CHEAP), 2 * WINDOW, endless(*members))
    for stage_id in range(3):
        for begin in range(0, int(WINDOW), int(WINDOW / 4)):
            assert got(served, stage_id, begin, begin + WINDOW) / WINDOW >= 0.1 - CHEAP / WINDOW - 1e-9, stage_id


@pytest.mark.parametrize(
    ("floor", "count", "expected"),
    [(None, 1, 0.1), (None, 3, 0.1), (None, 5, 0.1), (None, 10, 0.05), (0.3, 1, 0.3), (0.3, 3, 0.5 / 3), (0.0, 3, 0.0)],
)
def test_floor_in_force(floor: float | None, count: int, expected: float) -> None:
    """The option's value, at most an equal share of the floors' sum; by default min(0.1, 0.5 / stages)."""
    assert floor_of(floor, count) == pytest.approx(expected)


# ---- What a held end waits for ----


@pytest.mark.parametrize("order", ORDERS)
def test_replica_that_is_awaited_is_served_first(order: str) -> None:
    """Before the order, a plugin's choice and its stage's other replicas, until the awaited arrival has left."""
    low, high = stage(0, 3, replicas=3), stage(1, 9)
    made = ordered(order, low, high, ask=lambda _view: 1)
    awaited = low.replicas[1]
    awaited.awaited = awaited.arrivals[1].number
    for _ in range(2):
        assert made.decide() == (low, False, True)
        assert low.take_turn() is awaited
        awaited.dequeue()
        awaited.follow_queue()
    assert made.decide() == (high, False, True)
    assert low.take_turn() is not awaited


def test_a_stage_that_is_due_goes_before_one_that_is_awaited() -> None:
    """The floors of other stages are kept while a stage is awaited."""
    low, high = stage(0, 10_000), stage(1, 10_000)
    made = ordered("downstream_first", low, high, floor=0.1)
    low.replicas[0].awaited = low.replicas[0].arrivals[-1].number
    served = serve(made, {0: lambda: CHEAP, 1: lambda: CHEAP}, WINDOW / 10)
    assert 0.1 * WINDOW / 10 - CHEAP <= got(served, 1, 0, WINDOW / 10) <= 0.1 * WINDOW / 10 + CHEAP
