"""What is seen of one orchestrator's raw outputs: how long each took, and which had a first audio or text."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from omni_fastpath.figures import Distribution

from . import RESIDENCE_S

_FIRSTS = {"audio": "_audio_frames_by_request", "text": "_non_empty_first_output_timestamps_by_request"}
"""Upstream's records in a pool: a request is in one from its first audio, or text, until the stage ends it."""
_LOOPBACK = ("tcp://127.", "tcp://localhost", "tcp://[::1]")


class Replica:
    """One replica of a stage, or the ones that have stood in its slot one after the other.

    Attributes:
        gives: What its stage gives the user: ``audio``, ``text`` or another kind; None for nothing.
        is_on_this_host: Whether its clock is ours, so that the time of construction means something here. While the
            slot is empty, what was true of the last client in it, whose raw outputs may still be routed.
        residence: Of its raw outputs, seconds.
        firsts: Of those that had a request's first audio, or first text, seconds.
    """

    __slots__ = ("_client", "firsts", "gives", "is_on_this_host", "residence")

    def __init__(self) -> None:
        self.gives: str | None = None
        self.is_on_this_host = False
        self.residence = Distribution(RESIDENCE_S)
        self.firsts = Distribution(RESIDENCE_S)
        self._client: weakref.ref[Any] | None = None

    def look_at(self, pool: Any, client: Any) -> None:
        """Note the client that stands in the slot now, None for an empty slot."""
        if client is None or (self._client is not None and self._client() is client):
            return
        self._client = weakref.ref(client)
        self.is_on_this_host = is_on_this_host(client)
        self.gives = getattr(client, "final_output_type", None) if pool.final_output else None


@dataclass(slots=True)
class Dispatch:
    """One raw output between the beginning of its processing and the end of its routing.

    Attributes:
        replica: Whose it is.
        stage_id: Of its stage.
        constructed_s: When its stage made it, by that host's monotonic clock.
        had_first: Upstream's record of the requests that had a first audio, or text, of that stage.
        before: How many requests that record had before the processing.
        has_first: Whether the processing added one.
    """

    replica: Replica
    stage_id: int
    constructed_s: float
    had_first: Mapping[str, Any]
    before: int
    has_first: bool = False


class Account:
    """What is seen of one orchestrator. It outlives it, because counts must not go back.

    Attributes:
        replicas: By stage and replica.
        raw_outputs: How many were routed.
    """

    def __init__(self, orchestrator: Any) -> None:
        self._orchestrator = weakref.ref(orchestrator)
        self.replicas: dict[tuple[int, int], Replica] = {}
        self.raw_outputs = 0
        self._due: Dispatch | None = None

    def processing(self, stage_id: int, replica_id: int, raw_outputs: Any, *_: Any, **__: Any) -> Dispatch:
        """A raw output's processing begins; takes what upstream's method takes."""
        self._due = None  # what is routed while this one is processed belongs to it
        pool = self._pools()[stage_id]
        client = pool.clients[replica_id] if replica_id < len(pool.clients) else None
        replica = self._replica(stage_id, replica_id, pool, client)
        had_first = getattr(pool, _FIRSTS[replica.gives]) if replica.gives in _FIRSTS else {}
        return Dispatch(replica, stage_id, raw_outputs.timestamp, had_first, len(had_first))

    def processed(self, dispatch: Dispatch) -> None:
        """It was processed; it is what is routed next."""
        self._due = dispatch

    def routing(self, stage_id: int, *_: Any, **__: Any) -> Dispatch | None:
        """The routing of outputs begins; None where they are of no raw output, as a diffusion stage's.

        Takes what upstream's method takes.
        """
        dispatch, self._due = self._due, None
        if dispatch is None or dispatch.stage_id != stage_id:
            return None
        dispatch.has_first = len(dispatch.had_first) > dispatch.before  # routing forgets a request that ends
        return dispatch

    def routed(self, dispatch: Dispatch) -> None:
        """A raw output was routed."""
        self.raw_outputs += 1
        if dispatch.replica.is_on_this_host:
            residence_s = monotonic() - dispatch.constructed_s
            dispatch.replica.residence.observe(residence_s)
            if dispatch.has_first:
                dispatch.replica.firsts.observe(residence_s)

    def depths(self) -> Iterator[tuple[int, int, int]]:
        """Stage, replica, and how many raw outputs wait in its client's queue now; what is shown of it begins here."""
        for stage_id, pool in enumerate(self._pools()):
            for replica_id, client in enumerate(list(pool.clients)):
                if hasattr(client, "outputs_queue"):  # a diffusion stage's outputs have no time of construction
                    self._replica(stage_id, replica_id, pool, client)
                    yield stage_id, replica_id, client.outputs_queue.qsize()

    def _pools(self) -> Any:
        return getattr(self._orchestrator(), "stage_pools", ())

    def _replica(self, stage_id: int, replica_id: int, pool: Any, client: Any) -> Replica:
        replica = self.replicas.get((stage_id, replica_id)) or self.replicas.setdefault(
            (stage_id, replica_id), Replica()
        )
        replica.look_at(pool, client)
        return replica


def is_on_this_host(client: Any) -> bool:
    """Whether a replica's clock is this host's: it was spawned here, or sends by a local transport, or by none.

    A socket that listens on an address of a network may have another host behind it; with ``--omni-master-address``
    this host's own replicas send there, too. Only spawned ones have the manager of processes.
    """
    resources = getattr(client, "resources", None)
    socket = getattr(resources, "output_socket", None)
    if socket is None or getattr(resources, "engine_manager", None) is not None:
        return True
    try:
        address: str = socket.LAST_ENDPOINT.decode()
    except Exception:  # it is closed
        return False
    return not address.startswith("tcp://") or address.startswith(_LOOPBACK)
