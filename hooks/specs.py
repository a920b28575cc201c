"""The hooks, when they are called and with what.

All but ``on_patch_state`` and ``deadline`` are called on the orchestrator's event loop, between two raw outputs: what
a hook spends there, everybody's audio waits for. A hook that raises is reported once and its plugin is switched off,
whatever it raises, ``SystemExit`` too. A hook is called, and neither awaited nor iterated: one that must be is switched
off, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pluggy

PROJECT = "omni_fastpath"
ENTRY_POINT_GROUP = "omni_fastpath.hooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RawOutputView(NamedTuple):
    """One raw output after upstream processed it and before it is routed.

    Attributes:
        stage_id: Stage that it came from.
        replica_id: Replica of that stage.
        final_output: Whether the stage's outputs go to the user.
        raw_outputs: Upstream's ``EngineCoreOutputs``: one batch, an entry for each request that it touches.
        processed: Upstream's request outputs made from it, in the order in which they will be routed; may be empty.
        request_states: The orchestrator's live requests by id. Read only.
    """

    stage_id: int
    replica_id: int
    final_output: bool
    raw_outputs: Any
    processed: Sequence[Any]
    request_states: Mapping[str, Any]


class BacklogView(NamedTuple):
    """What waits when the next stage is chosen.

    Attributes:
        waiting: For each stage with a backlog, in no particular order: the queue of each of its replicas, first in
            first. An item is upstream's ``EngineCoreOutputs``, or the exception that ended the replica. Read only.
        request_states: The orchestrator's live requests by id. Read only.
    """

    waiting: Mapping[int, Sequence[Sequence[Any]]]
    request_states: Mapping[str, Any]


class PassReport(NamedTuple):
    """One pass over one replica that took at least one raw output.

    Attributes:
        stage_id: Stage that was drained.
        replica_id: Replica of that stage.
        items: Raw outputs taken.
        ended: ``empty``, ``routable``, ``items``, ``time``, ``floor`` (a stage that had less than its floor gives one),
            ``outranked`` (another stage goes first since the last yield) or ``gone`` (the replica was evicted or
            replaced, or the loop ends).
        queued: Raw outputs still queued at the end.
        duration_us: Time from the first take to the end, microseconds, yields included.
    """

    stage_id: int
    replica_id: int
    items: int
    ended: str
    queued: int
    duration_us: float


class Specs:
    """The hook specifications."""

    @hookspec(firstresult=True)
    def is_routable(self, view: RawOutputView) -> bool | None:
        """Say whether a raw output ends its replica's pass; None leaves it to the next plugin, at last to our default.

        Called after upstream processed a raw output of a final-output stage and before it routes it, where the end of
        a pass lets another stage in: another one has a backlog, and ``order`` is ``stage_order`` or a plugin chooses.
        """

    @hookspec(firstresult=True)
    def next_stage(self, view: BacklogView) -> int | None:
        """Choose the stage that is served next; None leaves it to the next plugin, at last to the YAML's ``order``.

        Asked when more than one stage has a backlog, none has less than its floor, and no end of a request waits for
        one of them: those go before any order. An id that has no backlog counts as None. A request's outputs of one
        stage stay in order whatever is chosen.
        """

    @hookspec(firstresult=True)
    def deadline(self, message: Any, arrived: float, deadline: float) -> float | None:
        """Say when a message for a user is due; None leaves it to the next plugin, at last to ``deadline``.

        Called on the front end's event loop, once for each message of a request when it arrives there.

        Args:
            message: Upstream's message, for example its ``OutputMessage``. Read only.
            arrived: When it arrived, in seconds of ``time.monotonic``.
            deadline: When it is due without a plugin, on the same clock.
        """

    @hookspec
    def on_dequeued(self, stage_id: int, replica_id: int, raw_outputs: Any) -> None:
        """A raw output, or the part of it that was held, was taken and passed upstream's keep-or-drop rule."""

    @hookspec
    def on_pass_end(self, report: PassReport) -> None:
        """A pass over a replica ended that took at least one raw output."""

    @hookspec
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        """Upstream routed a request output: to the front end, to the next stage, or nowhere if nobody needs it."""

    @hookspec
    def on_patch_state(self, patch: str, state: str, reason: str) -> None:
        """A patch's state in this process changed. Called on whatever thread changed it."""
