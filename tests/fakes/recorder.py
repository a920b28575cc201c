"""A hook plugin that records what it is told."""

from __future__ import annotations

from typing import Any

from omni_fastpath.hooks import PassReport, hookimpl


class Recorder:
    """The events of its hooks in order, as plain tuples.

    ``("dequeued", stage, replica, raw)``, ``("pass", report)``, ``("routed", stage, replica, output)``,
    ``("state", patch, state, reason)``.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    @hookimpl
    def on_dequeued(self, stage_id: int, replica_id: int, raw_outputs: Any) -> None:
        """Record a taken raw output."""
        self.events.append(("dequeued", stage_id, replica_id, raw_outputs))

    @hookimpl
    def on_pass_end(self, report: PassReport) -> None:
        """Record the end of a pass."""
        self.events.append(("pass", report))

    @hookimpl
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        """Record a routed request output."""
        self.events.append(("routed", stage_id, replica_id, output))

    @hookimpl
    def on_patch_state(self, patch: str, state: str, reason: str) -> None:
        """Record a change of a patch's state."""
        self.events.append(("state", patch, state, reason))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """The recorded events of one kind, without the kind."""
        return [event[1:] for event in self.events if event[0] == kind]
