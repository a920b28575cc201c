"""``get_output_nowait`` on vLLM's real client: exceptions and the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@pytest.fixture
def replica() -> Iterator[Any]:
    """A real ``AsyncMPClient`` without an engine behind it, with the patch alone."""
    from benchmarks.rigs.inprocess import QWEN3_OMNI, Replica

    with only("nonblocking_dequeue"):
        yield Replica(0, QWEN3_OMNI[0], 0)


@pytest.mark.parametrize("dead", [False, True])
def test_queued_exception_is_raised_as_upstream_raises_it(replica: Any, dead: bool) -> None:
    """Type, message, context suppression and cause are those of ``get_output_async``, engine dead or not."""
    replica.resources.engine_dead = dead
    raised = []
    for take in (replica.get_output_nowait, lambda: asyncio.run(replica.get_output_async())):
        replica.outputs_queue.put_nowait(ValueError("from the reader"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
            take()
        error = caught.value
        raised.append((type(error), str(error), error.__suppress_context__, error.__cause__))
    assert raised[0] == raised[1]
