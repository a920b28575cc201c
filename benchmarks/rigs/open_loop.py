"""An open loop: requests arrive when they are due, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from omni_fastpath.tools.ab.capture import Capture, Request, send, session


def run_open_loop(base_url: str, requests: Sequence[Request], starts_s: Sequence[float]) -> list[Capture]:
    """Start each request so many seconds from now; captures in the order of *requests*.

    Two servers get the same arrivals. In a closed loop the one that answers sooner also gets more to do.
    """
    return asyncio.run(_run(base_url, requests, starts_s))


async def _run(base_url: str, requests: Sequence[Request], starts_s: Sequence[float]) -> list[Capture]:
    async with session(base_url) as to:
        begun = time.monotonic()

        async def start(request: Request, start_s: float) -> Capture:
            await asyncio.sleep(begun + start_s - time.monotonic())
            return await send(to, request)

        return list(await asyncio.gather(*map(start, requests, starts_s)))
