"""A raw output that was taken and is not finished. Each of its remaining steps is done exactly once.

In each step, one line takes the argument out of a list, calls upstream, and records the remaining steps. So if an
exception is raised between two lines of this patch, ``finish`` continues where the work was left, and neither omits nor
repeats anything. The drain needs nothing else to step aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import vllm_omni.diffusion.data
from vllm_omni.engine.stage_pool import StagePool

if TYPE_CHECKING:
    from .replicas import Replica

# From 0.30 on. 0.28 has no such output.
is_diffusion_start: Callable[[Any], bool] = getattr(
    vllm_omni.diffusion.data, "is_diffusion_request_started_output", lambda _output: False
)


class Work:
    """A raw output and the remaining steps of upstream's handling.

    Args:
        orchestrator: Upstream's ``OrchestratorBase``.
        replica: The replica that sent it.

    Attributes:
        is_taken: Whether the replica's next raw output was taken.
        raw: A list with the raw output, until it is processed, or with None if there was nothing to take.
        made: A list with upstream's request outputs, until they are routed.
        ended: A list with the set of ids of requests that ended, until upstream has recorded it.
    """

    __slots__ = ("ended", "is_taken", "made", "orchestrator", "raw", "replica")

    def __init__(self, orchestrator: Any, replica: Replica) -> None:
        self.orchestrator, self.replica = orchestrator, replica
        self.is_taken = False
        self.raw: list[Any] = []
        self.made: list[list[Any]] = []
        self.ended: list[set[str]] = []

    async def take(self) -> bool:
        """Take the replica's next raw output, and return whether there was one.

        Raises:
            Exception: An exception that was queued in its place, for example that the engine died.
        """
        self.raw, self.is_taken = [await self.replica.take()], True
        return self.raw[0] is not None

    async def get_output_async(self) -> Any:
        """The raw output. In ``read`` this object plays the client that ``_poll_stage_raw`` reads from."""
        return self.raw[0]

    async def read(self) -> bool:
        """Unpack the raw output, and return False if upstream's rule drops it. May be repeated."""
        if self.raw[0] is not None and await StagePool._poll_stage_raw(self.replica.pool, self) is not None:
            return True
        del self.raw[0]
        return False

    async def process(self) -> list[Any]:
        """Let upstream process the raw output, and return its request outputs. ``finish`` routes them."""
        process, key = self.orchestrator._process_llm_stage_outputs, self.replica.key
        ids: set[str] = set()
        self.made, self.ended = [await process(*key, self.raw.pop(0), ids)], [ids]
        return self.made[0]

    async def finish(self) -> None:
        """Do what remains: route, record the ends, or first process."""
        while self.made or self.ended or self.raw:
            if self.made:
                await self.orchestrator._handle_processed_outputs(*self.replica.key, self.made.pop())
            elif self.ended:
                await self.orchestrator._finish_raw_terminal_requests(*self.replica.key, self.ended.pop())
            elif await self.read():
                await self.process()


class DiffusionOutput(Work):
    """An output of a diffusion stage, which has no batch to process."""

    __slots__ = ()

    async def read(self) -> bool:
        """Remove the metrics, and return whether anything else is left."""
        output = self.raw[0]
        if output is not None and not self.orchestrator._absorb_diffusion_metrics(*self.replica.key, output):
            return True
        del self.raw[0]
        return False

    async def process(self) -> list[Any]:
        """Let upstream record its time, which must not be repeated, and return it in a list."""
        self.made.append(made := [self.raw.pop(0)])
        if not is_diffusion_start(made[0]):
            self.replica.pool.record_output_timestamps(made)
        return made
