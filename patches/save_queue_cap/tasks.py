"""A queued save task, and the stream that it is of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .payload import Weight
from .upstream import key_prefix


def stream_of(task: Mapping[str, Any]) -> str:
    """The external request id that a save task belongs to; a clean-up task names it in its key prefix."""
    request = task.get("request")
    if request is not None:
        external_req_id: str = request.external_req_id
        return external_req_id
    return key_prefix(task).rsplit("_", 1)[0]


@dataclass(slots=True, eq=False)
class QueuedTask:
    """One task. ``weight`` is none until somebody has weighed it; most are sent before."""

    task: dict[str, Any] | None
    stream: Stream
    number: int
    since_s: float
    weight: Weight | None = None
    is_waiting: bool = True


@dataclass(slots=True, eq=False)
class Stream:
    """What one stream has on its way. ``tasks`` counts those queued and the one in flight."""

    key: str
    waiting: deque[QueuedTask] = field(default_factory=deque)
    in_flight: QueuedTask | None = None
    tasks: int = 0
    last_nbytes: int = 0
    virtual_s: float = 0.0
    last_put_s: float | None = None
    is_quick: bool = False
    is_slow: bool = False
    """Its last two puts were slow, or its last one clearly: left to the helper."""
    unfetched: int = 0
    fetches: int = 0
    given_up_at: int | None = None
    """Its ``fetches`` when a hold for unfetched chunks ended in which nobody had fetched any."""
