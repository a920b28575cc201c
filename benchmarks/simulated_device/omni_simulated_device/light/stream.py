"""What one request has on its way through the stages."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any


@dataclasses.dataclass(slots=True)
class Chunk:
    """Codec frames that code2wav decodes in one step.

    Attributes:
        frames: Those to be heard, each one code a codebook.
        context: How many frames before them are decoded with them; they cost time only.
        last: Whether the talker has ended.
    """

    frames: list[list[int]]
    context: int
    last: bool


@dataclasses.dataclass(slots=True)
class Stream:
    """A request on its way; its engines share it, because only stage 0 sees what was asked.

    Attributes:
        key: Its content in eight bytes; None until stage 0 has it.
        text_tokens: Planned length of its text.
        final_stage: The last stage that works on it; None if nobody said.
        rows: Chunks of the thinker that have arrived at the talker.
        rows_ended: Whether the last one has.
        chunks: What has arrived at code2wav and waits there.
        engines: Who has the request now, by stage.
        done: Stages that have ended it.
    """

    key: bytes | None = None
    text_tokens: int = 0
    final_stage: int | None = None
    rows: int = 0
    rows_ended: bool = False
    chunks: deque[Chunk] = dataclasses.field(default_factory=deque)
    engines: dict[int, Any] = dataclasses.field(default_factory=dict)
    done: set[int] = dataclasses.field(default_factory=set)


class Streams:
    """The requests that some stage of a server works on, by the id that all stages know."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def enter(self, name: str, stage: int, engine: Any) -> Stream:
        """A stage has got the request."""
        stream = self._streams.setdefault(name, Stream())
        stream.engines[stage] = engine
        return stream

    def leave(self, name: str, stage: int, *, aborted: bool) -> None:
        """A stage has ended the request; it is forgotten when all of them have, or when it was aborted."""
        stream = self._streams.get(name)
        if stream is None:
            return
        stream.engines.pop(stage, None)
        stream.done.add(stage)
        ended = stream.final_stage is None or len(stream.done) > stream.final_stage
        if not stream.engines and (ended or aborted):
            del self._streams[name]
