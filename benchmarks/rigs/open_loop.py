"""An open loop: requests arrive when they are due, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from benchmarks.ab.capture import Capture, Request, send
from benchmarks.rigs.captures import client


def run_open_loop(
    base_url: str, requests: Sequence[Request], starts_s: Sequence[float], late: list[float] | None = None
) -> list[Capture]:
    """Start each request so many seconds from now; captures in the order of *requests*, *late* as of `captures.client`.

    Two servers get the same arrivals. In a closed loop the one that answers sooner also gets more to do.
    """
    return asyncio.run(_run(base_url, requests, starts_s, late))


async def _run(
    base_url: str, requests: Sequence[Request], starts_s: Sequence[float], late: list[float] | None
) -> list[Capture]:
    async with client(base_url, late) as to:
        begun = time.monotonic()

        async def start(request: Request, start_s: float) -> Capture:
            await asyncio.sleep(begun + start_s - time.monotonic())
            return await send(to, request)

        return list(await asyncio.gather(*map(start, requests, starts_s)))
