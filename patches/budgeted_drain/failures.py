"""What becomes of an exception: upstream's rule, but a replica's death waits for what came before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from omni_fastpath.ledger import logger

from .held_ends import HeldEnd, HeldEnds
from .membership import Membership
from .replicas import Replica
from .upstream import EngineDeadError


class Failures:
    """Handles what reading or processing a raw output raised.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        members: The replicas that there are.
        held_ends: What is held.
        numbers: The count that numbers all arrivals.
    """

    def __init__(self, orchestrator: Any, members: Membership, held_ends: HeldEnds, numbers: Iterator[int]) -> None:
        self._orchestrator = orchestrator
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._members = members
        self._held_ends = held_ends
        self._numbers = numbers

    async def handle(self, replica: Replica, error: BaseException) -> None:
        """What upstream's loops do with an exception: evict a dead replica, ignore during shutdown, else give up.

        Raises:
            BaseException: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, EngineDeadError):
            await self._died(replica, error)
        elif not isinstance(error, Exception):
            raise error
        elif not self._shutdown.is_set():
            logger.error("omni-fastpath: processing of stage-%s replica-%s failed", *replica.slot, exc_info=error)
            raise error

    async def _died(self, replica: Replica, error: BaseException) -> None:
        """Let upstream evict a dead replica and fail its requests, after what came of them before.

        Until then the replica keeps its bindings, by which upstream finds the requests to fail, and is left out of the
        selection: it gets no new request, and no other request waits. A distributed pool's ``pick`` asks the hub alone.
        """
        pool, (stage_id, replica_id) = replica.pool, replica.slot
        if pool.clients[replica_id] is not replica.client:
            return  # the death of a client that was replaced is not its successor's, and one death is told once
        survives = any(each != replica_id for each in pool.live_replica_ids())
        submitted = {
            request_id: state
            for request_id, state in self._orchestrator.request_states.items()
            if stage_id in state.stage_submit_ts
        }
        bound = frozenset(each for each in submitted if pool.get_bound_replica_id(each) == replica_id)
        stranded = {each: state for each, state in submitted.items() if each in bound or not survives}
        was_available = bool(pool.is_replica_available(replica_id))
        evict = partial(self._evict, replica, error, stranded, bound, was_available=was_available)
        end = HeldEnd(next(self._numbers), replica.slot, frozenset(stranded), "everywhere", evict, failed=True)
        if self._held_ends.hold(end):
            pool._unavailable_replicas.add(replica_id)
            self._members.stale = True
        else:
            await self._orchestrator._handle_dead_replica(stage_id, replica_id, error)

    async def _evict(
        self,
        replica: Replica,
        error: BaseException,
        stranded: dict[str, Any],
        bound: frozenset[str],
        *,
        was_available: bool,
    ) -> None:
        """Evict the replica of a death that was held. If another client is in its slot, or none, fail its requests.

        Args:
            replica: The replica, with the client that died.
            error: The exception that told of it.
            stranded: The states of the requests, by id, that upstream would have failed when it died.
            bound: Those of them that were bound to it.
            was_available: Whether it is out of the selection because of this death alone.
        """
        pool, (stage_id, replica_id) = replica.pool, replica.slot
        client = pool.clients[replica_id]
        if was_available and (client is None or client is replica.client):
            pool._unavailable_replicas.discard(replica_id)
        if client is replica.client:
            await self._orchestrator._handle_dead_replica(stage_id, replica_id, error)
            return
        if client is not None:  # upstream does not shut down a client that was replaced
            with contextlib.suppress(Exception):
                replica.client.shutdown()
        for request_id, state in stranded.items():
            # By upstream's rule (``_handle_dead_replica``); the requests of another client in the slot are not meant. A
            # detach drops the rows of the coordinator's bindings and fails those requests itself.
            now_at = pool.get_bound_replica_id(request_id)
            lost = request_id in bound and (now_at == replica_id or (now_at is None and client is not None))
            if not lost and pool.live_replica_ids():
                continue
            if self._orchestrator.request_states.get(request_id) is state:  # failing another one may have ended it
                await self._orchestrator._fail_request_dead_stage(request_id, stage_id)
