"""A raw output that was taken and is not finished. Each of its remaining steps is done exactly once.

In each step, one line takes the argument out of a list, calls upstream, and records the remaining steps. So if an
exception is raised between two lines of this patch, ``finish`` continues where the work was left, and neither omits nor
repeats anything. The drain needs nothing else to step aside (``Dispatcher.finish``).
"""

from __future__ import annotations

import contextlib
from typing import Any

from . import upstream
from .replicas import Replica


class Work:
    """A raw output, or a part of one, and the remaining steps of upstream's handling.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        replica: The replica that sent it.
        number: Its place among the arrivals at all replicas.

    Attributes:
        raw: The raw outputs that are not processed, in order. It contains None if a poll found nothing, and two while
            an end is split off.
        made: Upstream's request outputs that are not routed, if any.
        ended: The ids of requests whose ends upstream has not recorded, if any.
    """

    __slots__ = ("ended", "made", "number", "orchestrator", "raw", "replica")

    def __init__(self, orchestrator: Any, replica: Replica, number: float) -> None:
        self.orchestrator = orchestrator
        self.replica = replica
        self.number = number
        self.raw: list[Any] = []
        self.made: list[list[Any]] = []
        self.ended: list[set[str]] = []

    async def get_output_async(self) -> Any:
        """Return the raw output as a client does, so that upstream's function can read it."""
        return self.raw[0]

    async def read(self) -> bool:
        """Unpack the next raw output, and return False if upstream's rule drops it. May be repeated."""
        if self.raw[0] is not None and await upstream.read(self.replica.pool, self) is not None:
            return True
        del self.raw[0]
        return False

    async def process(self) -> list[Any]:
        """Let upstream process the next raw output, and return its request outputs. ``finish`` routes them."""
        process, slot = self.orchestrator._process_llm_stage_outputs, self.replica.slot
        ids: set[str] = set()
        self.made, self.ended = [await process(*slot, self.raw.pop(0), ids)], [ids]
        return self.made[0]

    async def finish(self) -> None:
        """Do the remaining steps."""
        while self.made or self.ended or self.raw:
            if self.made:
                await self.orchestrator._handle_processed_outputs(*self.replica.slot, self.made.pop())
            elif self.ended:
                await self.orchestrator._finish_raw_terminal_requests(*self.replica.slot, self.ended.pop())
            elif await self.read():
                await self.process()


class DiffusionOutput(Work):
    """An output of a diffusion stage, which has no batch to process."""

    __slots__ = ()

    async def read(self) -> bool:
        """Remove the metrics, and return whether anything else is left."""
        output = self.raw[0]
        if output is not None and not self.orchestrator._absorb_diffusion_metrics(*self.replica.slot, output):
            return True
        del self.raw[0]
        return False

    async def process(self) -> list[Any]:
        """Let upstream record its time, which must not be repeated, and return it in a list."""
        self.made.append(made := [self.raw.pop(0)])
        if not upstream.is_diffusion_start(made[0]):
            self.replica.pool.record_output_timestamps(made)
        return made


class Death(Work):
    """The death of a replica. Upstream evicts it and fails its requests. All steps may be repeated.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        replica: The replica, with the client that died.
        number: Its place among the arrivals at all replicas.
        error: The exception that reported it.

    Attributes:
        stranded: The states of the requests, by id, that upstream would have failed when the replica died.
    """

    __slots__ = ("_bound", "stranded")

    def __init__(self, orchestrator: Any, replica: Replica, number: float, error: Exception) -> None:
        super().__init__(orchestrator, replica, number)
        self.raw.append(error)
        pool, (stage_id, replica_id) = replica.pool, replica.slot
        survives = any(each != replica_id for each in pool.live_replica_ids())
        states = orchestrator.request_states.items()
        submitted = {each: state for each, state in states if stage_id in state.stage_submit_ts}
        self._bound = {each for each in submitted if pool.get_bound_replica_id(each) == replica_id}
        self.stranded = {each: state for each, state in submitted.items() if each in self._bound or not survives}

    async def read(self) -> bool:
        """There is nothing to unpack."""
        return True

    async def process(self) -> list[Any]:
        """Evict the replica. If another client is in its slot by now, or none, fail its requests."""
        pool, (stage_id, replica_id), died = self.replica.pool, self.replica.slot, self.replica.client
        client = pool.clients[replica_id]
        if client is died:
            await self.orchestrator._handle_dead_replica(stage_id, replica_id, self.raw[0])
        else:
            if client is not None:  # upstream does not shut down a replaced client
                with contextlib.suppress(Exception):
                    died.shutdown()
            for request_id, state in self.stranded.items():
                # Upstream's rule (``_handle_dead_replica``), except for the requests of another client in the slot. A
                # detach removes the bindings and fails those requests itself.
                now_at = pool.get_bound_replica_id(request_id)
                lost = request_id in self._bound and (now_at == replica_id or (now_at is None and client is not None))
                if not lost and pool.live_replica_ids():
                    continue
                if self.orchestrator.request_states.get(request_id) is state:  # another failure may have ended it
                    await self.orchestrator._fail_request_dead_stage(request_id, stage_id)
        self.raw.clear()
        return []
