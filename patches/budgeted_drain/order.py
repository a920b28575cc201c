"""Decides which stage is served next, by the order of the stages and a floor of processing time for each.

Stages are served without preemption. A decision is made after each pass and after each yield. The floor is deficit
round robin (Shreedhar and Varghese, SIGCOMM 1995) on *processing time*, with a clock that advances only by processing.
A stage whose last raw output cost ``c`` is due once it has had a backlog while ``c / floor`` of processing time was
spent on any stage. A stage that is due gets one raw output ahead of the order. So in any period of processing time
``T`` in which a stage has a backlog, it gets at least ``floor * T`` minus its most expensive raw output, and at least
one raw output in each ``WINDOW_NS``. The floor alone gives it at most that plus one raw output. An idle stage saves
nothing up, and the other stages get its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from omni_fastpath.hooks.specs import BacklogView
from omni_fastpath.ledger import logger

from .replicas import Stage

FLOOR = 0.1
"""The default floor of a stage, for up to five stages. More stages share a half."""

FLOORS_TOGETHER = 0.5
"""Greatest sum of the floors of all stages, as a share of processing time. With more, the order has no effect."""

WINDOW_NS = 250e6
"""Longest processing time, a quarter of a second, before a stage with a backlog is due again. It gets at least one raw
output in each such window, however expensive the last one was. Without the window, a garbage collection during a raw
output (half a second was measured under overload) would cost the stage its floor for seconds."""

NextStage = Callable[[BacklogView], int | None]
"""A plugin's choice among the stages with a backlog. None means the built-in order."""


class Decision(NamedTuple):
    """Which stage is served next.

    Attributes:
        stage: The stage.
        due: Whether it precedes the order, because it got less than its floor.
        contested: Whether another stage may be next when its pass ends, because another one has a backlog, and the
            stages take turns or a plugin chooses.
    """

    stage: Stage
    due: bool
    contested: bool


def floor_of(floor: float | None, stages: int) -> float:
    """Return the effective floor, the option's value or 0.1, and at most an equal part of ``FLOORS_TOGETHER``."""
    greatest = FLOORS_TOGETHER / max(stages, 1)
    if floor is not None and floor > greatest:
        logger.warning(
            "omni-fastpath: budgeted_drain.floor %s is limited to %.3g, because there are %s stages",
            *(floor, greatest, stages),
        )
    return min(FLOOR if floor is None else floor, greatest)


class Order:
    """Chooses the stage that is served next.

    Args:
        order: ``stage_order`` (each in turn), ``downstream_first`` or ``visible_first``.
        floor: Minimum share of processing time of a stage with a backlog. 0 means none.
        ask: Asks a plugin to choose, if several stages have a backlog and none is due or awaited. None without a
            plugin.
        request_states: The orchestrator's current requests, for the plugin.
        stages: The stages, whose replicas may change.
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
        self._ask = ask
        self._takes_turns = order == "stage_order" or ask is not None
        self._request_states = request_states
        self._stages = stages
        self._spent_ns = 0.0
        self._turn = 0  # in stage_order, the stage at which the round begins

    def decide(self, current: Stage | None = None) -> Decision | None:
        """The stage that is served next, which may be the current one. None if no stage has a backlog.

        Args:
            current: The stage whose pass has not ended. In ``stage_order`` it still has its turn.
        """
        now = self._spent_ns
        waiting: list[Stage] = []
        for stage in self._stages:
            if stage.has_backlog():
                waiting.append(stage)
            else:
                stage.due_ns = now + stage.pause_ns  # an idle stage saves nothing up
        if len(waiting) < 2:
            return Decision(waiting[0], due=False, contested=False) if waiting else None
        turn = self._turn if current is None else current.stage_id
        first = min(waiting, key=lambda stage: self._place(stage, turn))
        if self._period:
            owed = min(waiting, key=attrgetter("due_ns"))
            if owed.due_ns < now and (owed is not first or self._ask is not None):  # a plugin may choose another one
                return Decision(owed, due=True, contested=self._takes_turns)
        if self._ask is not None and not first.is_awaited():
            queues = {stage.stage_id: tuple(replica.waiting for replica in stage.replicas) for stage in waiting}
            chosen = self._ask(BacklogView(queues, self._request_states))
            first = next((stage for stage in waiting if stage.stage_id == chosen), first)
        return Decision(first, due=False, contested=self._takes_turns)

    def _place(self, stage: Stage, turn: int) -> tuple[bool, bool, int]:
        """The place of a stage in the built-in order. A stage that a held end waits for precedes all others."""
        if self._order == "stage_order":
            return not stage.is_awaited(), stage.stage_id < turn, stage.stage_id
        first = self._order == "downstream_first" or stage.final_output or stage.has_first_audio()
        return not stage.is_awaited(), not first, -stage.stage_id

    def pass_ended(self, decision: Decision) -> None:
        """Note the end of a pass. In ``stage_order`` the next stage gets its turn, unless this one was due."""
        if not decision.due:
            self._turn = decision.stage.stage_id + 1

    def charge(self, stage: Stage, nanoseconds: int) -> None:
        """Note how long processing a raw output of ``stage`` took."""
        self._spent_ns = now = self._spent_ns + nanoseconds
        stage.pause_ns = pause = min(nanoseconds * self._period, WINDOW_NS)
        if stage.due_ns <= now:
            stage.due_ns += pause
        else:
            # A stage that got more than its floor waits for at most the time that its most expensive raw output costs
            # at that floor. Otherwise a stage that had the loop to itself for a while would starve afterwards.
            stage.due_ns = max(stage.due_ns, now + pause)
