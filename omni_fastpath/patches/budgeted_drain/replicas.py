"""The replicas whose raw outputs the drain takes, and how it takes one from each kind of client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient

from omni_fastpath.queues import override

from .work import DiffusionOutput, Work

POLL_WAIT_S = 0.001
"""Upstream's interval for replicas that can only be polled: of diffusion stages, and without an output queue."""

ReplicaKey = tuple[int, int]
"""Stage and replica."""


class Replica:
    """A client that is or was in upstream's pool, and that can only be polled.

    Args:
        pool: Upstream's ``StagePool``.
        key: Stage and replica.
        client: Upstream's client at that key.

    Attributes:
        is_in_line: Whether its next poll has a place in the line.
        early: How many raw outputs in its queue need not wait for their places. They are the first ones.
        work: The class of the steps of a raw output that is taken from it.
    """

    __slots__ = ("_on_put", "_put_back", "client", "early", "is_in_line", "key", "pool")
    work: type[Work] = Work

    def __init__(self, pool: Any, key: ReplicaKey, client: Any) -> None:
        self.pool, self.key, self.client = pool, key, client
        self.is_in_line, self.early = False, 0
        self._on_put: Callable[[Any, Any], None] = lambda *_: None
        self._put_back: Callable[[], None] = lambda: None

    def is_in_pool(self) -> bool:
        """Whether it is still at its key, because it was not evicted, detached or replaced."""
        return self.pool.clients[self.key[1]] is self.client

    def is_gone(self) -> bool:
        """Whether it was evicted, detached, replaced or marked unavailable."""
        return not (self.is_in_pool() and self.pool.is_replica_available(self.key[1]))

    async def take(self) -> Any:
        """The next raw output. None if there is none, and whatever upstream raises."""
        return await self.pool.poll_llm_raw_output(self.key[1], timeout_s=POLL_WAIT_S)

    def join(self, on_put: Callable[[QueuedReplica, Any], None]) -> None:
        """Call ``on_put``, which must not raise, for each put until ``leave``, and with None for each before.

        Here: nothing.
        """

    def leave(self) -> None:
        """End ``join``. An override that another package's wrapper covers stays, but from now on it only puts."""
        self._on_put = lambda *_: None
        self._put_back()


class DiffusionReplica(Replica):
    """A replica of a diffusion stage."""

    __slots__ = ()
    work = DiffusionOutput

    async def take(self) -> Any:
        """The next output. None if there is none."""
        return self.pool.poll_diffusion_output(self.key[1])


class QueuedReplica(Replica):
    """A replica whose client has an output queue, from which raw outputs are taken without waiting.

    Upstream's socket reader keeps a reference to the queue object, so the queue is not replaced. Instead, an instance
    attribute overrides its ``put_nowait`` until ``leave``.
    """

    __slots__ = ()

    def join(self, on_put: Callable[[QueuedReplica, Any], None]) -> None:
        """Watch the queue. An empty one may have no reader yet, which a dequeue starts."""
        queue = self.client.outputs_queue
        if queue.empty():
            self.client.get_output_nowait()
        self._on_put, put = on_put, queue.put_nowait

        def put_and_notify(item: Any) -> None:
            put(item)
            self._on_put(self, item)

        self._put_back = override(queue, "put_nowait", put_and_notify)
        for _ in range(queue.qsize()):
            on_put(self, None)

    def may_go_early(self, item: Any) -> bool:
        """Whether a raw output that was just put need not wait for its place in the line.

        It must be of a later stage from which users receive outputs, no request may end in it, and the same holds for
        all before it in the queue.

        Args:
            item: The raw output, an exception in its place, or None if it is not known.
        """
        if self.key[0] == 0 or not self.pool.final_output or self.client.outputs_queue.qsize() > self.early + 1:
            return False
        outputs = getattr(item, "outputs", None)
        return outputs is not None and not any(each.finished for each in outputs)

    async def take(self) -> Any:
        """The next raw output. Raises an exception that is in the queue, as upstream formats it."""
        return self.client.get_output_nowait()


def can_dequeue(client: Any) -> bool:
    """Whether a client has both dequeues of ``AsyncMPClient``, the waiting and the other one, and overrides neither."""
    names = ("get_output_nowait", "get_output_async")
    return all(getattr(type(client), name, None) is getattr(AsyncMPClient, name) for name in names)


def replica_in(pool: Any, key: ReplicaKey) -> Replica:
    """The replica at a key of upstream's pools, by its kind of client."""
    client = pool.clients[key[1]]
    if pool.stage_type == "diffusion":
        return DiffusionReplica(pool, key, client)
    is_queued = isinstance(getattr(client, "outputs_queue", None), asyncio.Queue) and can_dequeue(client)
    return (QueuedReplica if is_queued else Replica)(pool, key, client)
