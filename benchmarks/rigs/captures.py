"""What the benchmarks and tests do with captures: many at once, their times, and two runs against each other."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Sequence

import aiohttp

from omni_fastpath.tools.ab.capture import Capture, Request, answers_differ, send, session


def run_closed_loop(base_url: str, requests: Sequence[Request], max_concurrency: int = 1) -> list[Capture]:
    """Keep *max_concurrency* requests in flight, started in the given order, until all are answered.

    Captures come back in the order of *requests*.
    """
    captures: dict[int, Capture] = {}
    waiting = iter(enumerate(requests))

    async def worker(to: aiohttp.ClientSession) -> None:
        for index, request in waiting:
            captures[index] = await send(to, request)

    async def run() -> None:
        async with session(base_url) as to:
            await asyncio.gather(*(worker(to) for _ in range(max_concurrency)))

    asyncio.run(run())
    return [captures[index] for index in range(len(requests))]


def ttft_s(capture: Capture) -> float | None:
    """Time to first text, seconds."""
    return next((piece.at_s for piece in capture.pieces if piece.text), None)


def ttfp_s(capture: Capture) -> float | None:
    """Time to first audio, seconds."""
    return next((piece.at_s for piece in capture.audio_pieces), None)


def audio_gaps_s(capture: Capture) -> list[float]:
    """Times between successive pieces of audio, seconds."""
    return [after.at_s - before.at_s for before, after in itertools.pairwise(capture.audio_pieces)]


def digest(capture: Capture) -> str:
    """SHA-256 of `Capture.answer`."""
    return hashlib.sha256(json.dumps(capture.answer(), sort_keys=True).encode()).hexdigest()


def differences(ours: Sequence[Capture], theirs: Sequence[Capture]) -> list[str]:
    """Where two runs of the same requests disagree, one line each; empty when they agree."""
    return answers_differ([each.answer() for each in ours], [each.answer() for each in theirs])
