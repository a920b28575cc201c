"""The hooks, when they are called, and their arguments.

All hooks but ``on_patch_state`` are called on the orchestrator's event loop, which dispatches raw outputs, so the time
that a hook takes delays the audio of all requests. A hook that raises anything, also ``SystemExit``, is reported once
and its plugin is switched off. A plugin with a hook that must be awaited or iterated is refused. On 0.32.0rc1 only
``on_patch_state`` is called, because the patches that call the others are superseded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pluggy

PROJECT = "omni_fastpath"
ENTRY_POINT_GROUP = "omni_fastpath.hooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PassReport(NamedTuple):
    """One pass of the drain that took at least one raw output.

    Attributes:
        items: Raw outputs taken.
        ended: ``empty`` (nothing more was queued), ``items`` or ``time`` (the budget was spent), or ``over`` (the loop
            ends).
        queued: Raw outputs still queued at the end, at all replicas, and replicas that are about to be polled.
        duration_us: Time from the first take to the end, microseconds.
    """

    items: int
    ended: str
    queued: int
    duration_us: float


class Specs:
    """The hook specifications."""

    @hookspec
    def on_dequeued(self, stage_id: int, replica_id: int, raw_outputs: Any) -> None:
        """A raw output was taken, not of a diffusion stage, and upstream's keep-or-drop rule kept it."""

    @hookspec
    def on_pass_end(self, report: PassReport) -> None:
        """A pass that took at least one raw output has ended."""

    @hookspec
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        """Upstream has routed a request output to the front end, to the next stage, or nowhere."""

    @hookspec
    def on_patch_state(self, patch: str, state: str, reason: str) -> None:
        """The state of a patch in this process has changed. Called on the thread that changed it."""
