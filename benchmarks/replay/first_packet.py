"""An order that was tried: requests that have had no first packet first. A plugin, as somebody else would write one.

Of the stages with a backlog the one is chosen at whose replicas the next raw output has an entry of a request that has
had no text from the thinker, or no audio from code2wav yet; audio before text, and otherwise downstream first. What a
raw output brings cannot be seen before it is processed, so a request counts as waiting for audio from its first silent
output on. ``README.md`` says what came of it.
"""

from __future__ import annotations

from typing import Any

from omni_fastpath.hooks import BacklogView, hookimpl


class FirstPacketFirst:
    """The plugin.

    Args:
        seen: Stage ids whose outputs go to the user.
    """

    def __init__(self, seen: tuple[int, ...]) -> None:
        self._seen = sorted(seen, reverse=True)
        self._served: dict[int, set[str]] = {stage_id: set() for stage_id in seen}

    @hookimpl
    def on_routed(self, stage_id: int, replica_id: int, output: Any) -> None:
        """Note who has had a packet of a stage."""
        del replica_id
        served = self._served.get(stage_id)
        if served is None or output.request_id in served:
            return
        completion = output.outputs[0]
        audio = getattr(completion, "multimodal_output", None)
        if completion.token_ids or (audio is not None and audio.get("audio") is not None and audio["audio"].numel()):
            served.add(output.request_id)

    @hookimpl
    def next_stage(self, view: BacklogView) -> int:
        """The stage with somebody's first packet in front; else the last one."""
        for stage_id in self._seen:
            served = self._served[stage_id]
            for queue in view.waiting.get(stage_id, ()):
                if queue and any(entry.request_id not in served for entry in getattr(queue[0], "outputs", ())):
                    return stage_id
        return max(view.waiting)
