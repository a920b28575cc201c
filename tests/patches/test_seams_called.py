"""The tracer that finds calls of undeclared upstream functions while the tests of this folder run (`--traced`)."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from omni_fastpath.patches import PATCHES
from tests.patches.upstream_calls import UpstreamCalls

_UPSTREAM: dict[str, Any] = {"__name__": "vllm_omni.made_for_a_test"}
exec(  # noqa: S102 - functions whose module is upstream's
    """
import asyncio

class Base:
    def inner(self):
        return 1
    async def waits(self):
        await asyncio.sleep(0)
        return self.inner()

class Pool(Base):
    pass
""",
    _UPSTREAM,
)
_OURS: dict[str, Any] = {"__name__": "omni_fastpath.patches.nonblocking_dequeue.made_for_a_test"}
exec("async def wait(what):\n    return await what()\n", _OURS)  # noqa: S102 - a line whose file is a patch's


def test_the_tracer_sees_a_call() -> None:
    """An inherited, awaited function that is called through C, by where upstream defines it, and not what it calls."""
    with UpstreamCalls(PATCHES) as seen:
        asyncio.run(_OURS["wait"](functools.partial(_UPSTREAM["Pool"]().waits)))
    [line] = seen.undeclared()
    assert line.startswith("nonblocking_dequeue calls vllm_omni.made_for_a_test:Base.waits at ")
