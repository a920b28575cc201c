"""What becomes of an exception: upstream's rule, but a replica's death waits for what came before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from omni_fastpath.ledger import logger

from .membership import Membership
from .overtaking import HeldEnd, HeldEnds, Precedence, Predecessors
from .replicas import Replica


class Death(NamedTuple):
    """A replica's death that is held.

    Attributes:
        replica: The replica, with the client that died.
        error: What told of it.
        excluded: Whether it is out of the selection because of this death alone.
        stranded: The requests by id that upstream would tell, as they were when it died.
        bound: Those of them that were bound to it.
    """

    replica: Replica
    error: BaseException
    excluded: bool
    stranded: dict[str, Any]
    bound: set[str]


class Failures:
    """Handles what reading or processing a raw output raised.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        dead_error: What a dead replica's client raises.
        members: Who is there.
        held_ends: What is held.
        precedence: What must come before an end.
        clock: The count that numbers all arrivals.
    """

    def __init__(
        self,
        orchestrator: Any,
        dead_error: type[BaseException],
        members: Membership,
        held_ends: HeldEnds,
        precedence: Precedence,
        clock: Iterator[int],
    ) -> None:
        self._orchestrator = orchestrator
        self._shutdown: asyncio.Event = orchestrator._shutdown_event
        self._dead_error = dead_error
        self._members = members
        self._held_ends = held_ends
        self._precedence = precedence
        self._clock = clock

    async def handle(self, replica: Replica, error: BaseException) -> None:
        """What upstream's loops do with an exception: evict a dead replica, ignore during shutdown, else give up.

        Raises:
            BaseException: ``error``, unless it is a dead replica's or the orchestrator is shutting down.
        """
        if isinstance(error, self._dead_error):
            await self._died(replica, error)
            return
        if not isinstance(error, Exception):
            raise error
        if self._shutdown.is_set():
            return
        logger.error(
            "omni-fastpath: processing of stage-%s replica-%s failed",
            replica.stage_id,
            replica.replica_id,
            exc_info=error,
        )
        raise error

    async def _died(self, replica: Replica, error: BaseException) -> None:
        """Let upstream evict a dead replica and fail its requests, after what came of them before.

        Until then the replica stays with its bindings, by which upstream finds whom to tell, and is left out of the
        selection: nobody new is sent to it, and nobody else waits. A distributed pool's ``pick`` asks the hub alone. If
        its slot is empty or another's by then, its requests are told all the same, each once.
        """
        pool, stage_id, replica_id = replica.pool, replica.stage_id, replica.replica_id
        if pool.clients[replica_id] is not replica.client:
            return  # the death of a client that was replaced is not its successor's, and one death is told once
        number = next(self._clock)
        survives = any(each != replica_id for each in self._who_could_go_on(pool))
        stranded = {
            request_id: state
            for request_id, state in self._orchestrator.request_states.items()
            if stage_id in state.stage_submit_ts
            and (not survives or pool.get_bound_replica_id(request_id) == replica_id)
        }
        bound = {request_id for request_id in stranded if pool.get_bound_replica_id(request_id) == replica_id}
        predecessors: Predecessors = {}
        for request_id in stranded:
            found = self._precedence.before_end(
                self._members.stages, stage_id, request_id, number, aborts=True, failed=True
            )
            for before, last in found.items():
                predecessors[before] = max(predecessors.get(before, last), last)
        if not predecessors and not self._held_ends.any_before(number, stranded):
            await self._tell(replica, error)
            return
        death = Death(replica, error, self._exclude(replica), stranded, bound)
        self._members.stale = True
        self._held_ends.add(HeldEnd(number, stranded, lambda: self._evict(death)), predecessors)

    async def _evict(self, death: Death) -> None:
        """What came before a death has been dispatched: evict the replica, or tell its requests if it is gone."""
        self._include(death)
        slot = death.replica.pool.clients[death.replica.replica_id]
        if slot is death.replica.client:
            await self._tell(death.replica, death.error)
            return
        if slot is not None:  # nobody else shuts down a client that was replaced
            with contextlib.suppress(Exception):
                death.replica.client.shutdown()
        for request_id in self._still_stranded(death):
            await self._orchestrator._fail_request_dead_stage(request_id, death.replica.stage_id)

    # ---- What upstream does with a dead replica, and knows of it ----

    async def _tell(self, replica: Replica, error: BaseException) -> None:
        """Let upstream handle a death now."""
        await self._orchestrator._handle_dead_replica(replica.stage_id, replica.replica_id, error)

    def _who_could_go_on(self, pool: Any) -> Collection[int]:
        """The slots of a pool whose replicas keep its requests alive, by upstream's rule."""
        live: Collection[int] = pool.live_replica_ids()
        return live

    def _exclude(self, replica: Replica) -> bool:
        """Leave a replica out of the selection; whether it was in it."""
        was_in: bool = replica.pool.is_replica_available(replica.replica_id)
        replica.pool._unavailable_replicas.add(replica.replica_id)
        return was_in

    def _include(self, death: Death) -> None:
        """Give its slot back to the selection, if it is left out because of this death and nobody else is in it."""
        pool, replica_id = death.replica.pool, death.replica.replica_id
        slot = pool.clients[replica_id]
        if death.excluded and (slot is None or slot is death.replica.client):
            pool._unavailable_replicas.discard(replica_id)

    def _still_stranded(self, death: Death) -> Iterator[str]:
        """Who was stranded by a death and has not been told, by upstream's rule (``_handle_dead_replica``).

        The slot is empty by now, or another client's, whose own requests are not meant. Each is looked at when it is
        asked for: telling the one before may have ended it.
        """
        pool, replica_id = death.replica.pool, death.replica.replica_id
        replaced = pool.clients[replica_id] is not None
        for request_id, state in death.stranded.items():
            now_at = pool.get_bound_replica_id(request_id)
            # Whoever detaches a replica drops the rows of the coordinator's bindings and tells those requests himself.
            lost = request_id in death.bound and (now_at == replica_id or (now_at is None and replaced))
            still = self._orchestrator.request_states.get(request_id) is state
            if still and (lost or not self._who_could_go_on(pool)):
                yield request_id
