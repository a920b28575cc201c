"""What is seen of one orchestrator's raw outputs: how long each took, and what went ahead of a first audio."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from omni_fastpath.figures import Distribution

from .bounds import ENTRIES, RESIDENCE_S
from .upstream import audio_frames, first_texts, is_on_this_host

RING = 16_384
"""Raw outputs of which is known when they were routed: more than the last bound of ``entries_ahead`` has entries, so
that what is not known any more belongs above it in any case."""


class Line:
    """One replica of a stage.

    Attributes:
        is_on_this_host: Whether its clock is ours, so that the time of construction means something here. While its
            slot is empty, what was true of the last client in it, whose raw outputs may still wait to be routed.
        residence: Of its raw outputs, seconds.
        first_audio: Of those that carried somebody's first audio, seconds.
        first_text: Of those that carried somebody's first text, seconds.
        ahead: Entries of any stage that were routed between a first audio's construction and its own routing.
        elsewhere: Raw outputs that were routed and not timed.
    """

    __slots__ = ("_client", "ahead", "elsewhere", "first_audio", "first_text", "is_on_this_host", "residence")

    def __init__(self, client: Any) -> None:
        self.residence = Distribution(RESIDENCE_S)
        self.first_audio = Distribution(RESIDENCE_S)
        self.first_text = Distribution(RESIDENCE_S)
        self.ahead = Distribution(ENTRIES)
        self.elsewhere = 0
        self.is_on_this_host = False
        self.look_at(client)

    def look_at(self, client: Any) -> None:
        """Another client may stand in the slot by now, of a replica on another host."""
        self._client: Callable[[], Any] = weakref.ref(client) if client is not None else _nobody
        if client is not None:
            self.is_on_this_host = is_on_this_host(client)

    def is_of(self, client: Any) -> bool:
        """Whether this is the client that was looked at."""
        return self._client() is client

    @property
    def raw_outputs(self) -> int:
        """All that were routed."""
        return sum(self.residence.counts) + self.elsewhere


def _nobody() -> None:
    """A slot without a client."""


class Account:
    """What is seen of one orchestrator. It outlives it, because counts must not go back.

    Attributes:
        firsts: For each stage upstream's own record of who has had a first audio, or a first text, of its outputs; an
            empty one for a stage whose outputs go to nobody.
        entries: Entries that were routed.
        routed: When the last raw outputs were routed, and how many entries had been routed before.
    """

    def __init__(self, orchestrator: Any) -> None:
        self._orchestrator = weakref.ref(orchestrator)
        self.firsts = _Firsts(orchestrator.stage_pools)
        self.lines: dict[tuple[int, int], Line] = {}
        self.entries = 0
        self.routed: deque[tuple[float, int]] = deque(maxlen=RING)

    @property
    def orchestrator(self) -> Any:
        """Upstream's; None when it is gone."""
        return self._orchestrator()

    def line(self, stage_id: int, replica_id: int) -> Line:
        """The line of a replica, made at the first look at it, or at its first raw output before that."""
        found = self.lines.get((stage_id, replica_id))
        if found is None:
            found = self.lines[stage_id, replica_id] = Line(self._client(stage_id, replica_id))
        return found

    def look(self) -> None:
        """See who stands in the replicas' slots now; lines are made here, so that what is shown begins at nothing."""
        for stage_id, pool in enumerate(getattr(self.orchestrator, "stage_pools", ())):
            for replica_id, client in enumerate(pool.clients):
                line = self.lines.get((stage_id, replica_id))
                if line is not None:
                    if not line.is_of(client):
                        line.look_at(client)
                elif hasattr(client, "outputs_queue"):  # a diffusion stage's outputs have no time of construction
                    self.line(stage_id, replica_id)
                    self.firsts[stage_id]  # finds what it is for

    def let_go(self) -> None:
        """Of an orchestrator that is gone keep what is counted, and not what was needed to count."""
        if self.orchestrator is None:
            self.firsts.clear()
            self.routed.clear()

    def note_firsts(self, line: Line, stage_id: int, constructed_s: float, now_s: float) -> None:
        """A raw output with somebody's first audio or text is routed; its own entries are not counted yet."""
        if self.firsts.is_audio[stage_id]:
            self.note_first_audio(line, constructed_s, now_s)
        else:
            line.first_text.observe(now_s - constructed_s)

    def note_first_audio(self, line: Line, constructed_s: float, now_s: float) -> None:
        """As ``note_firsts``, of first audio whatever the stage."""
        line.first_audio.observe(now_s - constructed_s)
        before = self.entries
        for routed_s, entries in reversed(self.routed):
            if routed_s <= constructed_s:
                break
            before = entries
        line.ahead.observe(self.entries - before)

    def depths(self) -> Iterator[tuple[int, int, int]]:
        """Stage, replica, and how many raw outputs wait in its client's queue now."""
        for stage_id, pool in enumerate(getattr(self.orchestrator, "stage_pools", ())):
            for replica_id, client in enumerate(list(pool.clients)):
                queue = getattr(client, "outputs_queue", None)
                if queue is None:
                    continue
                try:
                    waiting = queue.qsize()
                except (AttributeError, NotImplementedError, RuntimeError, ValueError):  # as upstream's own monitor
                    continue
                yield stage_id, replica_id, waiting

    def _client(self, stage_id: int, replica_id: int) -> Any:
        pools = getattr(self.orchestrator, "stage_pools", ())
        clients = pools[stage_id].clients if stage_id < len(pools) else ()
        return clients[replica_id] if replica_id < len(clients) else None


class _Firsts(dict[int, dict[str, Any]]):
    """By stage, found when it has a replica: before that a pool does not know what it is for.

    Attributes:
        is_audio: Whether a stage's record is of first audio, and not of first text; of those that have a record.
    """

    def __init__(self, pools: list[Any]) -> None:
        super().__init__()
        self._of = {stage_id: weakref.ref(pool) for stage_id, pool in enumerate(pools)}
        self.is_audio: dict[int, bool] = {}

    def __missing__(self, stage_id: int) -> dict[str, Any]:
        pool = self._of[stage_id]()
        if pool is None or pool.stage_client is None:  # its last replica died before this raw output's turn came
            return {}
        frames = audio_frames(pool)
        found = frames if frames is not None else first_texts(pool)
        if found is not None:
            self.is_audio[stage_id] = frames is not None
        self[stage_id] = found if found is not None else {}
        return self[stage_id]
