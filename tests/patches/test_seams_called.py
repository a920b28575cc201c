"""Every upstream function that a patch calls is a seam of that patch: nothing that we rely on can move unseen.

A tracer sees what is called while the other tests of this folder run (`--traced`); here is that it sees it.
"""

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
    """By where upstream defines the function, inherited, through C and awaited; not what that function calls."""
    with UpstreamCalls(PATCHES) as seen:
        asyncio.run(_OURS["wait"](functools.partial(_UPSTREAM["Pool"]().waits)))
    [line] = seen.undeclared()
    assert line.startswith("nonblocking_dequeue calls vllm_omni.made_for_a_test:Base.waits at ")
