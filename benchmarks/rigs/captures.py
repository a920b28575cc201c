"""What the benchmarks and tests do with captures: many at once, their times, and two runs against each other."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import aiohttp

from benchmarks.ab.capture import Capture, Piece, Request, answers_differ, send, session

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


LOOK_S = 0.02


@contextlib.asynccontextmanager
async def client(base_url: str, late: list[float] | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session; *late* gets by how much this process' event loop is late meanwhile, seconds, fifty times a second."""

    async def look() -> None:
        while late is not None:
            due = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            late.append(time.monotonic() - due)

    looking = asyncio.ensure_future(look())
    try:
        async with session(base_url) as to:
            yield to
    finally:
        looking.cancel()


def run_closed_loop(
    base_url: str, requests: Sequence[Request], max_concurrency: int = 1, late: list[float] | None = None
) -> list[Capture]:
    """What requests brought back, in their order, *max_concurrency* at a time; *late* as of `client`."""
    return in_flight(base_url, requests, max_concurrency, send, late)


def in_flight(
    base_url: str,
    requests: Sequence[Asked],
    max_concurrency: int,
    ask: Callable[[aiohttp.ClientSession, Asked], Awaitable[Answer]],
    late: list[float] | None = None,
) -> list[Answer]:
    """Keep *max_concurrency* requests in flight, started in the given order, until all are answered.

    Answers come back in the order of *requests*.
    """
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def worker(to: aiohttp.ClientSession) -> None:
        for index, request in waiting:
            answers[index] = await ask(to, request)

    async def run() -> None:
        async with client(base_url, late) as to:
            await asyncio.gather(*(worker(to) for _ in range(max_concurrency)))

    asyncio.run(run())
    return [answers[index] for index in range(len(requests))]


def run_open_loop(
    base_url: str, requests: Sequence[Request], starts_s: Sequence[float], late: list[float] | None = None
) -> list[Capture]:
    """Start each request so many seconds from now; captures in the order of *requests*, *late* as of `client`.

    Two servers get the same arrivals. In a closed loop the one that answers sooner also gets more to do.
    """

    async def run() -> list[Capture]:
        async with client(base_url, late) as to:
            begun = time.monotonic()

            async def start(request: Request, start_s: float) -> Capture:
                await asyncio.sleep(begun + start_s - time.monotonic())
                return await send(to, request)

            return list(await asyncio.gather(*map(start, requests, starts_s)))

    return asyncio.run(run())


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` of the values lie, linear between neighbours; NaN of nothing."""
    import numpy as np

    known = list(values)
    return float(np.quantile(known, share)) if known else math.nan


def ttft_s(capture: Capture) -> float | None:
    """Time to first text, seconds."""
    return next((piece.at_s for piece in capture.pieces if piece.text), None)


def ttfp_s(capture: Capture) -> float | None:
    """Time to first audio, seconds."""
    return next((piece.at_s for piece in capture.audio_pieces), None)


def audio_gaps_s(capture: Capture) -> list[float]:
    """Times between successive pieces of audio, seconds."""
    return _gaps_s(capture.audio_pieces)


def text_gaps_s(capture: Capture) -> list[float]:
    """Times between successive pieces of text, seconds."""
    return _gaps_s([piece for piece in capture.pieces if piece.text])


def _gaps_s(pieces: Sequence[Piece]) -> list[float]:
    return [after.at_s - before.at_s for before, after in itertools.pairwise(pieces)]


def digest(capture: Capture) -> str:
    """SHA-256 of `Capture.answer`."""
    return hashlib.sha256(json.dumps(capture.answer(), sort_keys=True).encode()).hexdigest()


def differences(ours: Sequence[Capture], theirs: Sequence[Capture]) -> list[str]:
    """Where two runs of the same requests disagree, one line each; empty when they agree."""
    return answers_differ([each.answer() for each in ours], [each.answer() for each in theirs])
