"""The observations of one orchestrator: raw outputs, the first audio and text in them, requests without output."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from time import monotonic, time
from typing import Any
from weakref import WeakKeyDictionary, ref

from .first_output import SEEN, FirstOutput
from .histograms import Distribution

End = Callable[[], None] | None
"""Called when upstream's method has returned."""

_FIRSTS = {"audio": "_audio_frames_by_request", "text": "_non_empty_first_output_timestamps_by_request"}
"""Upstream's records in a pool. A request is in one of them from its first audio or text until the stage ends it."""


@dataclass(slots=True)
class ReplicaAccount:
    """One replica of a stage.

    Attributes:
        gives: The kind of output that its stage sends to the user, such as ``audio`` or ``text``. None if it sends
            none.
        residence: Residence of its raw outputs, in seconds. None if it is on another host, whose clock differs.
        dequeued_s: When its last raw outputs were dequeued. Their number limits how many are counted ahead of one.
    """

    gives: str | None
    residence: Distribution | None
    dequeued_s: deque[float] = field(default_factory=partial(deque, maxlen=1024))


class Account:
    """The observations of one orchestrator. It is made on the orchestrator's thread, which is its ``thread``.

    Args:
        orchestrator: The orchestrator.
        journeys: The requests whose legs are measured, by id.
        counters: The patch's counters.
    """

    def __init__(self, orchestrator: Any, journeys: Mapping[str, FirstOutput], counters: dict[str, int]) -> None:
        self.orchestrator = ref(orchestrator)
        self._journeys, self._counters = journeys, counters
        self._replicas: WeakKeyDictionary[Any, ReplicaAccount] = WeakKeyDictionary()
        self._processed: tuple[int, float, ReplicaAccount] | None = None
        self._output_s: dict[str, float] = {}  # when a stage last made an output of each request
        self._paused_s = -inf  # when the engine was last seen paused
        self.thread = threading.current_thread()

    def processing(self, stage_id: int, replica_id: int, raw_outputs: Any, *_: Any, **__: Any) -> End:
        """Called when processing begins. Returns what to call when it ends, or None if the replica is gone.

        Takes the same arguments as upstream.
        """
        self._processed = None  # outputs that are routed while this one is processed are made from it
        now_s, made_s, pool = monotonic(), raw_outputs.timestamp, self.pools[stage_id]
        if (replica := self._replica(stage_id, replica_id, pool)) is None:
            return None
        replica.dequeued_s.append(now_s)
        for entry in raw_outputs.outputs:
            self._output_s[entry.request_id] = now_s
        had_first = getattr(pool, _FIRSTS.get(replica.gives or "", ""), {})
        before = len(had_first)

        def processed() -> None:
            self._processed = stage_id, made_s, replica
            new = max(0, len(had_first) - before) if replica.residence is not None else 0
            for request_id in islice(reversed(had_first), new):  # the newest keys of a dict are last
                if (journey := self._journeys.get(request_id)) is not None:
                    # The queue is first in, first out, so those ahead were dequeued since this one was made.
                    ahead = sum(at_s > made_s for at_s in replica.dequeued_s) - 1
                    journey.note_made(str(replica.gives), stage_id, (made_s, now_s), ahead)

        return processed

    def routing(self, stage_id: int, *_: Any, **__: Any) -> End:
        """Called when routing begins. Returns what to call when it ends, or None for outputs of a diffusion stage.

        Takes the same arguments as upstream.
        """
        last, self._processed = self._processed, None
        return None if last is None or last[0] != stage_id else partial(self._routed, *last[1:])

    def _routed(self, made_s: float, replica: ReplicaAccount) -> None:
        self._counters["observed"] += 1
        if replica.residence is not None:
            replica.residence.observe(monotonic() - made_s)

    @property
    def pools(self) -> Any:
        """The orchestrator's pools. Empty if it no longer exists."""
        return getattr(self.orchestrator(), "stage_pools", ())

    def depths(self) -> Iterator[tuple[int, int, int]]:
        """Stage, replica, and the depth of its client's queue. A replica has metrics from the first call on."""
        for stage_id, pool in enumerate(self.pools):
            for replica_id, client in enumerate(list(pool.clients)):
                if hasattr(client, "outputs_queue"):  # a diffusion stage's outputs have no time of construction
                    self._replica(stage_id, replica_id, pool)
                    yield stage_id, replica_id, client.outputs_queue.qsize()

    def note_paused(self) -> None:
        """Note that the engine is paused. From now on no request has waited longer than since then."""
        self._paused_s = monotonic()

    def without_output(self) -> Iterator[tuple[tuple[int, int | None], float]]:
        """For each request, the stage and replica that it waits for, and the seconds since any stage made an output.

        Time in a pause of the engine does not count. Requests that wait for their client are left out, and those at a
        diffusion stage, whose only output is the last.
        """
        pools = self.pools
        states = dict(getattr(self.orchestrator(), "request_states", {}))  # one step, as another thread may change it
        for request_id in self._output_s.copy().keys() - states.keys():
            self._output_s.pop(request_id, None)
        for request_id, state in states.items():
            submitted_s = state.stage_submit_ts.copy()
            unfinished = (stage_id for stage_id in sorted(submitted_s) if _has(pools[stage_id], request_id))
            stage_id = next(unfinished, max(submitted_s, default=None))
            if stage_id is not None and pools[stage_id].stage_type != "diffusion":
                since_output_s = monotonic() - self._output_s.get(request_id, -inf)
                since_input_s = time() - max(submitted_s.values())
                ended = [segment.finished for segment in state.streaming.segments.copy().values()]  # of a session
                if since_output_s > since_input_s or not (ended and all(ended)):
                    key = stage_id, pools[stage_id].get_bound_replica_id(request_id)
                    yield key, min(since_output_s, since_input_s, monotonic() - self._paused_s)

    def _replica(self, stage_id: int, replica_id: int, pool: Any) -> ReplicaAccount | None:
        client = next(islice(pool.clients, replica_id, None), None)
        if client is None:
            return None
        if (found := self._replicas.get(client)) is None:
            here = is_on_this_host(client)
            residence = SEEN.of("residence_seconds", stage=str(stage_id), replica=str(replica_id)) if here else None
            gives = getattr(client, "final_output_type", None) if pool.final_output else None
            found = self._replicas[client] = ReplicaAccount(gives, residence)
        return found


def _has(pool: Any, request_id: str) -> bool:
    """Whether a stage has not finished a request."""
    return pool.stage_type == "diffusion" or request_id in pool.output_processor.request_states


def is_on_this_host(client: Any) -> bool:
    """Whether a replica is on this host, because it was spawned here or does not send over TCP.

    A socket that listens on a network address may receive from another host. With ``--omni-master-address`` replicas of
    this host send there too. Only spawned ones have a manager of processes.
    """
    resources = getattr(client, "resources", None)
    socket = getattr(resources, "output_socket", None)
    if socket is None or getattr(resources, "engine_manager", None) is not None:
        return True
    try:
        address: str = socket.LAST_ENDPOINT.decode()
    except Exception:  # it is closed
        return False
    return not address.startswith("tcp://")
