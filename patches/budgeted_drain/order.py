"""Which stage is served next: the order of the stages, and a floor of processing time for each.

Served without preemption: a decision falls after each pass and after each yield. The floor is deficit round robin
(Shreedhar and Varghese, SIGCOMM 1995) on *processing time*, kept on one clock that only processing moves: a stage whose
last raw output cost ``c`` is due once it has had a backlog while ``c / floor`` of processing was spent, on any stage,
and one that is due gets one raw output ahead of the order. So in any stretch of processing time ``T`` in which a stage
has a backlog it gets at least ``floor * T`` less its dearest raw output, and never less than one in ``WINDOW_NS``; the
floor alone makes it no more than that plus one. An idle stage saves nothing up and gives its share away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from omni_fastpath.hooks.specs import BacklogView
from omni_fastpath.ledger import logger

from . import FLOORS_TOGETHER
from .replicas import Stage

FLOOR = 0.1
"""Floor of a stage where none is set, with up to five stages; more stages share a half."""

WINDOW_NS = 250e6
"""Longest that a stage with a backlog is not due, a quarter of a second of processing: it gets at least a raw output in
each such window, however dear the last one was. Without it the stage whose raw output Python happens to collect garbage
in (half a second was seen under overload) pays for that with its floor for seconds."""

AWAITED_FLOOR = 0.1
"""Least floor of a stage that a held end waits for (``held_ends.py``), whatever floor is set: without one, an end
or a replica's death would wait for ever behind a backlog that goes first and does not run empty."""

NextStage = Callable[[BacklogView], int | None]
"""A plugin's choice among the stages with a backlog; None leaves it to the built-in order."""


def floor_of(floor: float | None, stages: int) -> float:
    """The floor in force: the one that is set, by default ``min(0.1, 0.5 / stages)``.

    A pipeline whose stages the deploy YAML does not name may have more of them than the set one allows; then, what they
    can get.
    """
    greatest = FLOORS_TOGETHER / max(stages, 1)
    if floor is not None and floor > greatest:
        logger.warning(
            "omni-fastpath: budgeted_drain.floor is %s, %s stages can have %.3g; it is that", floor, stages, greatest
        )
    return min(FLOOR if floor is None else floor, greatest)


class Order:
    """Chooses the stage whose turn it is.

    Args:
        order: ``stage_order`` (each in turn), ``downstream_first`` or ``visible_first``.
        floor: Least share of processing time of a stage with a backlog; 0 for none. A stage that a held end waits
            for has at least ``AWAITED_FLOOR``.
        ask: A plugin's choice, asked when more than one stage has a backlog and none is due; None without one.
        request_states: The orchestrator's live requests, for the plugin.
        stages: The stages; their replicas come and go.
    """

    def __init__(
        self,
        order: str,
        floor: float,
        ask: NextStage | None,
        request_states: Mapping[str, Any],
        stages: Sequence[Stage],
    ) -> None:
        self._order = order
        self._period = 1.0 / floor if floor else 0.0
        self._awaited_period = 1.0 / max(floor, AWAITED_FLOOR)
        self._ask = ask
        self._request_states = request_states
        self._stages = stages
        self._spent_ns = 0.0
        self._turn = 0  # in stage_order, the stage at which the round begins
        self.in_turn = order == "stage_order" or ask is not None
        """Whether the end of a pass can let another stage in, other than one that is due."""
        self.contested = False
        """Whether more than one stage had a backlog at the last decision."""
        self.due: Stage | None = None
        """The stage that the last decision chose because it was due, not because of the order."""

    def next(self) -> Stage | None:
        """The stage that is served now; None when no stage has a backlog."""
        now = self._spent_ns
        waiting: list[Stage] = []
        for stage in self._stages:
            if not stage.has_backlog():
                stage.due_ns = now + stage.pause_ns  # idle: nothing is saved up
                continue
            waiting.append(stage)
            if not self._period and not stage.is_awaited():
                stage.due_ns = now  # nothing is owed where there is no floor
        self.due = None
        self.contested = len(waiting) > 1
        if not self.contested:
            return waiting[0] if waiting else None
        first, owed = min(waiting, key=self._place), min(waiting, key=attrgetter("due_ns"))
        if owed.due_ns < now and (owed is not first or self._ask is not None):  # a plugin may choose another one
            self.due = owed
            return owed
        if self._ask is None:
            return first
        queues = {stage.stage_id: tuple(replica.waiting for replica in stage.replicas) for stage in waiting}
        chosen = self._ask(BacklogView(queues, self._request_states))
        return next((stage for stage in waiting if stage.stage_id == chosen), first)

    def _place(self, stage: Stage) -> tuple[bool, int]:
        """The place of a stage in the built-in order; the least is served first."""
        if self._order == "stage_order":
            return stage.stage_id < self._turn, stage.stage_id
        first = self._order == "downstream_first" or stage.final_output or stage.has_first_audio()
        return not first, -stage.stage_id

    def pass_ended(self, stage: Stage) -> None:
        """A pass over ``stage`` ended by the order's leave: in ``stage_order`` the next one's turn comes."""
        self._turn = stage.stage_id + 1

    def would_go_on(self, stage: Stage) -> bool:
        """Whether ``stage``, in the middle of its pass, would be chosen again after what has arrived."""
        self._turn = stage.stage_id
        return self.next() is stage and self.due is None

    def charge(self, stage: Stage, nanoseconds: int) -> None:
        """Note that processing a raw output of ``stage`` took so long."""
        self._spent_ns = now = self._spent_ns + nanoseconds
        period = self._awaited_period if stage.is_awaited() else self._period
        stage.pause_ns = pause = min(nanoseconds * period, WINDOW_NS)
        if stage.due_ns <= now:
            stage.due_ns += pause
        else:
            # What it got beyond its floor is held against it for no longer than its dearest raw output is worth: a
            # stage that had the loop to itself for a while would starve afterwards.
            stage.due_ns = max(stage.due_ns, now + pause)
