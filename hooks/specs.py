"""The hooks, when they are called, and their arguments.

All hooks but ``on_patch_state`` and ``deadline`` are called on the orchestrator's event loop, between two raw outputs,
so the time that a hook takes delays the audio of all requests. A hook that raises anything, also ``SystemExit``, is
reported once and its plugin is switched off. So is a hook that would have to be awaited or iterated.
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
    """One raw output after upstream has processed it and before it is routed.

    Attributes:
        stage_id: The stage that sent it.
        replica_id: Replica of that stage.
        final_output: Whether users receive the stage's outputs.
        raw_outputs: Upstream's ``EngineCoreOutputs``, one batch with an entry for each of its requests.
        processed: Upstream's request outputs made from it, in the order in which they will be routed. May be empty.
        request_states: The orchestrator's current requests by id. Read only.
    """

    stage_id: int
    replica_id: int
    final_output: bool
    raw_outputs: Any
    processed: Sequence[Any]
    request_states: Mapping[str, Any]


class BacklogView(NamedTuple):
    """The queued raw outputs when the next stage is chosen.

    Attributes:
        waiting: For each stage with a backlog, in no particular order, the queue of each of its replicas, the oldest
            item first. An item is upstream's ``EngineCoreOutputs``, or the exception that ended the replica. Read only.
        request_states: The orchestrator's current requests by id. Read only.
    """

    waiting: Mapping[int, Sequence[Sequence[Any]]]
    request_states: Mapping[str, Any]


class PassReport(NamedTuple):
    """One pass over one replica that took at least one raw output.

    Attributes:
        stage_id: The stage.
        replica_id: Replica of that stage.
        items: Raw outputs taken.
        ended: ``empty``, ``routable``, ``items``, ``time``, ``floor`` (one raw output of a stage that had less than its
            floor), ``outranked`` (another stage precedes it since the last yield) or ``gone`` (the replica was evicted
            or replaced, or the loop ends).
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
        """Return whether a raw output ends its replica's pass. None means the next plugin, and finally the default.

        Called after upstream has processed a raw output of a final-output stage and before it routes it, if another
        stage may be next: another one has a backlog, and ``order`` is ``stage_order`` or a plugin chooses the stage.
        """

    @hookspec(firstresult=True)
    def next_stage(self, view: BacklogView) -> int | None:
        """Return the stage that is served next. None means the next plugin, and finally the configured ``order``.

        Called if several stages have a backlog, none of them got less than its floor, and no end of a request waits for
        one of them, because such stages precede any order. The id of a stage without a backlog counts as None. The
        outputs of a request at one stage remain in order.
        """

    @hookspec(firstresult=True)
    def deadline(self, message: Any, arrived: float, deadline: float) -> float | None:
        """Return the deadline of a message for a user. None means the next plugin, and finally ``deadline``.

        Called on the front end's event loop, once for each message of a request when it arrives there.

        Args:
            message: Upstream's message, for example its ``OutputMessage``. Read only.
            arrived: When it arrived, in seconds of ``time.monotonic``.
            deadline: Its deadline without a plugin, on the same clock.
        """

    @hookspec
    def on_dequeued(self, stage_id: int, replica_id: int, raw_outputs: Any) -> None:
        """A raw output, or a held part of it, was taken, and upstream's keep-or-drop rule kept it."""

    @hookspec
    def on_pass_end(self, report: PassReport) -> None:
        """A pass that took at least one raw output has ended."""

    @hookspec
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        """Upstream has routed a request output to the front end, to the next stage, or nowhere."""

    @hookspec
    def on_patch_state(self, patch: str, state: str, reason: str) -> None:
        """The state of a patch in this process has changed. Called on the thread that changed it."""
