"""Up to 0.26: upstream's own poll loop, run for one raw output.

There most of what happens to a raw output stands inside the loop itself (streaming state, statistics, what becomes of
an exception), in no function that could be called. So the whole loop is called, as it is, with a stand-in for its
``self``: a ``Round``. Everything is the orchestrator's, reading and writing, but for the pools: one has a replica,
whose next raw output is the one that our loop has taken, and the others have none. When the loop asks for the next
replica the round is over: its shutdown event reads true, and the loop returns where it looks at that, before its sleep.
Our loop stays in charge of all that is between two raw outputs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .replicas import Replica

Body = Callable[[Any], Awaitable[None]]
"""Upstream's ``_orchestration_loop``, as a function of its ``self``."""

AvailableIds = Callable[[Any], Sequence[int]]
"""The slots of a pool that upstream would poll."""

Judge = Callable[[Any, list[Any]], bool]
"""Asked about a raw output and what was made of it, before that is routed."""


class _Shutdown:
    """The orchestrator's shutdown event as one round sees it.

    Before the round's raw output is read it is not set, whatever the orchestrator's says: what was taken is dispatched.

    Attributes:
        is_over: Whether the round has nothing more to give.
        is_read: Whether it has given what it had.
    """

    __slots__ = ("_event", "is_over", "is_read", "set")

    def __init__(self, event: Any) -> None:
        self._event = event
        self.set = event.set
        self.is_over = self.is_read = False

    def is_set(self) -> bool:
        return self.is_over or (self.is_read and self._event.is_set())


class _NoReplicas:
    """A pool that the loop passes over."""

    def live_replica_ids(self) -> tuple[()]:
        return ()

    available_replica_ids = live_replica_ids


class _OnePool:
    """A pool of upstream's of which one replica is polled once; else it is what it stands for.

    It is its own sequence of replica ids: the one, and at the next the round is over.
    """

    def __init__(self, pool: Any, shutdown: _Shutdown, available_ids: AvailableIds) -> None:
        self.pool = pool
        self.stage_type = pool.stage_type  # asked once: each time upstream's looks for a client
        self._shutdown = shutdown
        self._available_ids = available_ids
        self.replica_id = -1
        self.item: Any = None
        self.error: BaseException | None = None
        self.stranded: list[str] | None = None
        self.judge: Judge | None = None
        self.said = False
        self.processed: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def live_replica_ids(self) -> _OnePool:
        return self

    available_replica_ids = live_replica_ids

    def __iter__(self) -> _OnePool:
        return self

    def __next__(self) -> int:
        shutdown = self._shutdown
        shutdown.is_over = shutdown.is_read
        return self.replica_id

    def __bool__(self) -> bool:
        """Whether anybody is left, which 0.26 asks after a death."""
        return bool(self._available_ids(self.pool))

    async def poll_llm_raw_output(self, _replica_id: int, **_timeout: float) -> Any:
        self._shutdown.is_read = True
        if self.error is not None:
            raise self.error
        return self.item

    def poll_diffusion_output(self, _replica_id: int) -> Any:
        self._shutdown.is_read = True
        if self.error is not None:
            raise self.error
        return self.item

    async def process_llm_raw_outputs(self, replica_id: int, raw_outputs: Any, iteration_stats: Any = None) -> Any:
        processed = await self.pool.process_llm_raw_outputs(replica_id, raw_outputs, iteration_stats=iteration_stats)
        if self.judge is not None:
            self.said = self.judge(raw_outputs, processed)
        self.processed = processed
        return processed

    def mark_replica_unavailable(self, replica_id: int) -> list[str]:
        """Upstream's; or, where the slot is another's by now, whom the death of the one before has stranded."""
        if self.stranded is None:
            found: list[str] = self.pool.mark_replica_unavailable(replica_id)
            return found
        self.pool.release_bindings(self.stranded)
        return self.stranded


class Round:
    """The orchestrator as upstream's loop sees it, for one raw output of one stage at a time."""

    def __init__(self, orchestrator: Any, stage_id: int, shutdown: _Shutdown, pool: _OnePool) -> None:
        vars(self).update(
            _fastpath_stands_for=orchestrator,
            _shutdown_event=shutdown,
            num_stages=stage_id + 1,
            stage_pools=[_NoReplicas()] * stage_id + [pool],
        )

    def __getattr__(self, name: str) -> Any:
        """The orchestrator's, which is remembered: what the loop reads is given to an orchestrator once."""
        found = vars(self)[name] = getattr(self._fastpath_stands_for, name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).pop(name, None)
        setattr(self._fastpath_stands_for, name, value)


class StageRounds:
    """The rounds of one stage, of which one runs at a time."""

    def __init__(self, orchestrator: Any, stage_id: int, pool: Any, body: Body, available_ids: AvailableIds) -> None:
        self._shutdown = _Shutdown(orchestrator._shutdown_event)
        self.pool = _OnePool(pool, self._shutdown, available_ids)
        self._round = Round(orchestrator, stage_id, self._shutdown, self.pool)
        self._body = body

    @property
    def said(self) -> bool:
        """What the last round's judge said; False without one."""
        return self.pool.said

    async def run(
        self,
        replica_id: int,
        item: Any = None,
        *,
        error: BaseException | None = None,
        stranded: list[str] | None = None,
        judge: Judge | None = None,
    ) -> list[Any] | None:
        """Put an item, or an exception instead of it, through upstream's loop.

        Args:
            replica_id: The replica that it came from.
            item: The raw output, or a diffusion stage's output.
            error: What reading raises instead.
            stranded: With an error: who was bound to the replica, where its slot is another's by now.
            judge: Asked before routing; what it says is in ``said`` then.

        Returns:
            What was made of a raw output; None where its processing failed, and upstream lived with that.

        Raises:
            BaseException: What upstream's loop raises.
        """
        pool, shutdown = self.pool, self._shutdown
        pool.replica_id, pool.item, pool.error, pool.stranded, pool.judge = replica_id, item, error, stranded, judge
        shutdown.is_over = shutdown.is_read = False
        pool.processed, pool.said = None, False
        try:
            await self._body(self._round)
            return pool.processed
        finally:
            pool.item = pool.error = pool.judge = pool.processed = None  # nothing is kept alive


class Rounds:
    """Upstream's loop for one item, whatever its stage.

    Args:
        orchestrator: Upstream's ``Orchestrator``.
        body: Its loop, as it stood before the patch.
        available_ids: The slots of a pool that upstream would poll.
    """

    def __init__(self, orchestrator: Any, body: Body, available_ids: AvailableIds) -> None:
        self._orchestrator = orchestrator
        self._body = body
        self._available_ids = available_ids
        self._stages: dict[int, StageRounds] = {}

    def of(self, replica: Replica) -> StageRounds:
        """The rounds of a replica's stage."""
        found = self._stages.get(replica.stage_id)
        if found is None or found.pool.pool is not replica.pool or found.pool.stage_type is None:
            found = StageRounds(self._orchestrator, replica.stage_id, replica.pool, self._body, self._available_ids)
            self._stages[replica.stage_id] = found
        return found
