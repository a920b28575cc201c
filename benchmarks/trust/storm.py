"""``python -m benchmarks.trust.storm``: a thousand clients leave, and nothing of them stays in ``/dev/shm``.

Each asks for streamed audio alone, 32 at a time, and closes its connection by RST after up to a second, a tenth of them
in the middle of the body. Real stage engines run on the simulated device. Every fifth client, and one that stays during
the storm, has the same ``X-Request-Id``. Twenty requests before the storm and twenty after it, half of them for text
alone, have it too.

The program exits with 1 if a chunk or lock file of these requests is there 15 s after the last answer, if an answer
differs from the one before the storm, or if the client that stayed did not get the answer that it gets alone.
``--stock`` shows what upstream leaves. ``--release`` is another release that was fetched (`benchmarks.rigs.overlays`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks.ab.capture import Request, chat_request, send, session
from benchmarks.rigs import side_by_side, whole_server
from benchmarks.rigs.arm import FASTPATH, STOCK
from benchmarks.rigs.captures import digest
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import guarded
from benchmarks.trust import segments

COUNT, AT_ONCE, PARITY = 1000, 32, 20
REST_S = 15.0
DEVICE = {"stages": {"thinker": {"base_ms": 8.0}, "talker": {"base_ms": 6.0}, "code2wav": {"base_ms": 4.0}}}
NAME = f"storm-{os.getpid()}"
"""In the id of every request, and so in the name of each of its chunks."""
SAME = f"{NAME}-same"
_LINGER = struct.pack("ii", 1, 0)
PROMPT = "Tell me about the weather " * 12


@dataclass
class Seen:
    """What a storm showed: files then, and at the end; how many of the answers differ; what clients still found."""

    files_during: int = 0
    files_after: list[str] = field(default_factory=list)
    answers: int = 0
    differ: int = 0
    storm_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    state: str = ""

    @property
    def is_well(self) -> bool:
        """Whether nothing stayed and every answer is the same."""
        return not self.files_after and self.answers == PARITY + 1 and not self.differ


async def _leave(url: str, model: str, number: int, rng: random.Random) -> None:
    """One client that leaves."""
    address = urlsplit(url)
    # Of some the thinker has ended and the talker has not, so that upstream does not remove what the thinker sent.
    tokens = rng.choice((10, 30, 100, 300))
    request = chat_request(f"{PROMPT} {number}", modalities=("audio",), max_tokens=tokens, model=model, ignore_eos=True)
    body = json.dumps(request.body).encode()
    name = SAME if number % 5 == 0 else f"{NAME}-{number}"
    head = (
        f"POST {request.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {name}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    made: socket.socket = writer.get_extra_info("socket")
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
    writer.write(head.encode() + (body[: len(body) // 2] if number % 10 == 3 else body))
    await writer.drain()
    await asyncio.sleep(rng.random())
    writer.transport.abort()


async def _answers(url: str, requests: Sequence[Request]) -> list[str]:
    """Digests of the answers, four at a time, all under one request id."""
    room = asyncio.Semaphore(4)

    async def one(request: Request) -> str:
        async with room:
            return digest(await send(to, request))

    async with session(url, headers={"X-Request-Id": SAME}) as to:
        return list(await asyncio.gather(*map(one, requests)))


async def storm(server: Server, count: int, rest_s: float = REST_S) -> Seen:
    """A storm at a server that is ready."""
    url, seen, rng, waiting = server.url, Seen(), random.Random(39), iter(range(count))
    # A request for text alone always leaves a chunk, that of its prompt. What a client leaves depends on the moment.
    wants = [("text", "audio") if n % 2 else ("text",) for n in range(PARITY)]
    asks = partial(chat_request, model=server.model)
    requests = [asks(f"{PROMPT} {n}", modalities=each, max_tokens=60) for n, each in enumerate(wants)]
    stays = asks(f"{PROMPT} stays", max_tokens=400, ignore_eos=True)
    before = await _answers(url, [*requests, stays])

    async def leaves() -> None:
        for number in waiting:
            await _leave(url, server.model, number, rng)
            seen.files_during = max(seen.files_during, len(segments(NAME)))

    began_s = time.monotonic()
    one = asyncio.create_task(_answers(url, [stays]))
    await asyncio.gather(*(leaves() for _ in range(AT_ONCE)))
    seen.storm_s = time.monotonic() - began_s
    stayed = await one
    after = [*await _answers(url, requests), *stayed]
    seen.answers = len(after)
    seen.differ = sum(mine != theirs for mine, theirs in zip(after, before, strict=True))
    await asyncio.sleep(rest_s)
    seen.files_after = segments(NAME)
    snapshots = server.snapshots()
    if snapshots:
        patch = snapshots["api"].patches["abandoned_chunks"]
        seen.state, seen.counters = patch.state.value, dict(patch.counters)
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """0: nothing stayed and all answers are the same. 1: not so."""
    parser = side_by_side.parser("benchmarks.trust.storm", __doc__)
    parser.add_argument("--clients", type=int, default=COUNT, help=f"that leave (default {COUNT})")
    parser.add_argument("--stock", action="store_true", help="without this package")
    parser.add_argument("--release", help="another release of vLLM-Omni")
    options = parser.parse_args(argv)

    def run(console: Console) -> int:
        arm = STOCK if options.stock else FASTPATH
        with whole_server.server(arm, "qwen3_omni", "qwen3_omni_2x.yaml", DEVICE, release=options.release) as server:
            seen = asyncio.run(storm(server, options.clients))
        say = partial(console.print, highlight=False, soft_wrap=True)
        say(f"{options.clients} clients left in {seen.storm_s:.0f} s; at most {seen.files_during} files meanwhile")
        say(f"{REST_S:.0f} s later: {len(seen.files_after)} files; {seen.differ} of {seen.answers} answers differ")
        say(f"abandoned_chunks {seen.state}: {seen.counters}")
        for name in seen.files_after[:10]:
            say(f"  {name}")
        return 0 if seen.is_well else 1

    return guarded("storm", run)


if __name__ == "__main__":
    sys.exit(main())
