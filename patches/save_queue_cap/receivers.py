"""Which streams somebody takes the chunks of: a text-only request ends at this stage, and its chunks lie there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_MOST = 4096


def has_receiver(request: Any, stage_id: int) -> bool:
    """Whether the next stage takes part in this request: text-only ones end here, and nobody fetches their chunks."""
    info = getattr(request, "additional_information", None)
    if info is None:
        return True
    if not isinstance(info, Mapping):  # a packed payload, of which one entry is wanted
        entry = info.entries.get("omni_final_stage_id")
        final = None if entry is None else entry.scalar_data
    else:
        final = info.get("omni_final_stage_id")
    return final is None or int(final) > stage_id


class Receivers:
    """What is known of it, by stream.

    Args:
        is_received: Whether somebody fetches a request's chunks.
    """

    def __init__(self, is_received: Callable[[Any], bool] = lambda _request: True) -> None:
        self.asked: set[str] = set()
        """Streams of which it is known."""
        self._is_received = is_received
        self._without: dict[str, None] = {}

    def ask(self, request: Any) -> None:
        """A task is the first of its stream, or of one that was forgotten."""
        if len(self.asked) > _MOST:
            self.asked.clear()
        self.asked.add(request.external_req_id)
        if not self._is_received(request):
            self.note_without(request.external_req_id)

    def note_without(self, stream: str) -> None:
        """Nobody will fetch this stream's chunks."""
        self._without[stream] = None
        while len(self._without) > _MOST:
            self._without.pop(next(iter(self._without)), None)

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Of names of segments, those that somebody may fetch."""
        return [name for name in names if name.rsplit("_", 2)[0] not in self._without]
