"""Up to 0.26, where upstream has no helpers to call: its own loop handles each item, and each death (``rounds``)."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from functools import partial
from typing import Any

from .dispatch import Dispatcher, Outcome
from .failures import Death, Failures
from .replicas import Replica
from .rounds import AvailableIds, Rounds


class RoundDispatcher(Dispatcher):
    """Dispatches by upstream's own loop.

    Args:
        rounds: Upstream's loop.
        others: As ``Dispatcher``.
    """

    def __init__(self, orchestrator: Any, *, rounds: Rounds, **others: Any) -> None:
        super().__init__(orchestrator, **others)
        self._rounds = rounds

    async def _dispatch(self, replica: Replica, reading: Awaitable[Any], *, judge: bool) -> Outcome:
        try:
            raw = await reading
            if raw is None:
                return "dropped"
            if self._observers.on_dequeued is not None:
                self._observers.on_dequeued(stage_id=replica.stage_id, replica_id=replica.replica_id, raw_outputs=raw)
        except BaseException as error:
            await self._failures.handle(replica, error)
            return "failed"
        rounds = self._rounds.of(replica)
        processed = await rounds.run(replica.replica_id, raw, judge=partial(self._judge, replica) if judge else None)
        if processed is None:
            return "failed"
        self._note_routed(replica, processed)
        return "routable" if rounds.said else "dispatched"

    def _is_only_metrics(self, _replica: Replica, _output: Any) -> bool:
        return False  # from 0.28

    async def _route_diffusion(self, replica: Replica, output: Any) -> None:
        await self._rounds.of(replica).run(replica.replica_id, output)
        self._note_routed(replica, [output])


class RoundFailures(Failures):
    """Leaves a death to upstream's own except branch, once what came before it has been dispatched.

    On 0.22 and 0.24 a death ends the orchestrator, whoever else lives, and a replica cannot be left out of the
    selection. From 0.26 on those fail that were bound to the replica, and the orchestrator ends with the last one.

    Args:
        rounds: Upstream's loop.
        available_ids: The slots of a pool that upstream would poll.
        can_exclude: Whether upstream's pools know replicas that live and are left out.
        others: As ``Failures``.
    """

    def __init__(self, *others: Any, rounds: Rounds, available_ids: AvailableIds, can_exclude: bool) -> None:
        super().__init__(*others)
        self._rounds = rounds
        self._available_ids = available_ids
        self._can_exclude = can_exclude
        self._dying: list[Any] = []

    async def _died(self, replica: Replica, error: BaseException) -> None:
        if not any(each is replica.client for each in self._dying):  # one that is polled says it again
            await super()._died(replica, error)

    def _exclude(self, replica: Replica) -> bool:
        self._dying.append(replica.client)
        return self._can_exclude and super()._exclude(replica)

    def _who_could_go_on(self, pool: Any) -> Collection[int]:
        return self._available_ids(pool) if self._can_exclude else ()

    async def _tell(self, replica: Replica, error: BaseException) -> None:
        await self._rounds.of(replica).run(replica.replica_id, error=error)

    async def _evict(self, death: Death) -> None:
        replica = death.replica
        self._dying = [each for each in self._dying if each is not replica.client]
        self._include(death)
        stranded = None
        if self._can_exclude and replica.pool.clients[replica.replica_id] is not replica.client:
            stranded = list(self._still_stranded(death))
        await self._rounds.of(replica).run(replica.replica_id, error=death.error, stranded=stranded)
