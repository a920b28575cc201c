"""Does anything grow, or get later, within an hour? ``python -m tests.trust.hours``.

Whole servers at the same time, each with ports, folders and real stage processes of its own: stock and fastpath at 0.8
of the configuration's capacity, and fastpath with ``--max-num-queued-reqs`` at 2.5 times that, where most are refused.
Requests arrive in an open loop (Poisson), with text and audio, of many lengths; one client in five leaves in the
middle, some before the first piece. Steps are long and slots are few, so that the simulated device is what limits, and
a server takes a fifth of a core.

Sampled through the run, by process: memory (USS, RSS), threads, open descriptors, asyncio tasks and blocks that
Python's allocator has given out (`counts`, a plugin in every arm); and what of the server's requests lies in
``/dev/shm``, where chunks bear their requests' names: of clients that stayed, and, judged by nobody since upstream
leaves them alike (docs/upstream-defects.md), of those that left. The first quarter is warming up. Memory's slope is
Theil and Sen's through what follows. Counts are compared at rest: before the load, after eight requests, and after it.

The rule, by which it exits with 1: something of fastpath grows by more than one and a half times what the same grows by
of stock and ``ALLOWED`` more; or its median first audio rises from the second quarter to the last by a quarter more
than stock's does; or one of its requests failed, or a process had to be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.rigs import about, results, server_arms, whole_server
from benchmarks.rigs.captures import run_closed_loop, ttfp_s
from benchmarks.rigs.quantiles import quantile
from benchmarks.rigs.server import Server
from benchmarks.server.arms import ARMS, ServerArm
from omni_fastpath.tools.ab.capture import Capture, Request, chat_request, send, session
from tests.trust import SHARED_MEMORY, counts

STEPS = {
    "thinker": {"base_ms": 120},
    "talker": {"base_ms": 100, "min_frames": 8, "max_frames": 30},
    "code2wav": {"base_ms": 80},
}
SLOTS, LIMIT = 4, 8
"""Requests in a step of a stage; requests that a server with a limit admits."""
TOKENS = (8, 30)
LEAVES = 0.2
"""Share of the clients that close the connection before the end."""
LEAVER = "leaves"
EVERY_S = 30.0
REST_S = 15.0
"""After which nothing of a load is under way."""

STOCK = "stock"
SIDES: Mapping[str, tuple[ServerArm, float]] = {
    STOCK: (ARMS[STOCK], 0.8),
    "fastpath": (ARMS["fastpath"], 0.8),
    "beyond": (dataclasses.replace(ARMS["fastpath"], arguments=("--max-num-queued-reqs", str(LIMIT))), 2.5),
}
"""Each side's arm, and its load as a multiple of the capacity."""
MEMORY = ("USS, MiB", "RSS, MiB", "blocks, 1000s")
ALLOWED = {"USS, MiB": 8, "blocks, 1000s": 20, "threads": 2, "descriptors": 4, "tasks": 2, "chunks": 0}
"""How much more than one and a half times stock's growth is no matter, each of a process."""

OUTCOMES = ("served", "refused", "left", "failed")

Side = Mapping[str, Any]
"""What came of a side.

``before`` and ``after`` at rest and ``samples`` between are `Watched.sample`'s; ``seen`` says of each request when it
was due (seconds into the load), how it went, and its seconds to first audio; ``errors`` what the failed were told;
``shutdown`` how the server ended, and ``left`` the chunks that lay there afterwards.
"""


class Watched:
    """A side's server on real stage processes, and what can be seen of it from outside."""

    def __init__(self, name: str, arm: ServerArm, folder: Path) -> None:
        self.name, self._plugin = f"trust{os.getpid()}{name}", folder / name
        deploy = folder / f"{name}.yaml"
        text = whole_server.deploy("qwen3_omni.yaml").read_text()
        deploy.write_text(text.replace("max_num_seqs: 128", f"max_num_seqs: {SLOTS}"))
        environment = {**whole_server.environment(arm, STEPS), **counts.plugin(self._plugin)}
        model = whole_server.model_folder("qwen3_omni")
        self.server = Server(model, deploy, environment=environment, arguments=arm.arguments)

    def asked(self, number: int | str, draws: random.Random, leaves: float = LEAVES) -> Request:
        """A request; what is random of it follows from *draws*."""
        after = draws.randint(0, TOKENS[0]) if draws.random() < leaves else None
        body: dict[str, Any] = {
            "max_tokens": draws.randint(*TOKENS),
            "ignore_eos": True,
            "request_id": f"{self.name}-{LEAVER if after is not None else 'stays'}-{number}",
        }
        return chat_request(f"Question {number}", abort_after=after, **body)

    def chunks(self) -> list[Path]:
        """What lies in ``/dev/shm`` of its requests."""
        return [entry for entry in SHARED_MEMORY.iterdir() if self.name in entry.name]

    def sample(self) -> dict[str, Any]:
        """What there is now: of each process, by its role, and of its requests in ``/dev/shm``."""
        roles: dict[str, dict[str, float]] = {}
        for pid, role in self.server.processes().items():
            process = psutil.Process(pid)
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                memory = process.memory_full_info()
                values = {"USS, MiB": memory.uss / 2**20, "RSS, MiB": memory.rss / 2**20}
                values |= {"threads": process.num_threads(), "descriptors": process.num_fds()}
                roles[role] = {**values, **counts.read(self._plugin, pid)}
        names = [entry.name for entry in self.chunks()]
        left = sum(LEAVER in name for name in names)
        return {"roles": roles, "chunks": len(names) - left, "chunks of clients that left": left}

    async def bears(self) -> float:
        """Requests per second that it answers while there are always more than it has slots."""
        draws = random.Random("what it bears")
        asked = [self.asked(f"b{number}", draws, leaves=0) for number in range(88)]
        captures = await asyncio.to_thread(run_closed_loop, self.server.url, asked, 2 * LIMIT)
        ends = sorted(each.started_at_s + each.e2e_s for each in captures)[LIMIT : -2 * LIMIT]
        return (len(ends) - 1) / (ends[-1] - ends[0])

    async def load(self, rate: float, seconds: float) -> dict[str, Any]:
        """Requests for so long, and samples meanwhile, until the last request has ended."""
        draws, begun = random.Random("an hour"), time.monotonic()
        seen: list[tuple[float, str, float | None]] = []
        errors: Counter[str] = Counter()
        samples: list[dict[str, Any]] = []

        async def one(to: aiohttp.ClientSession, due: float, request: Request) -> None:
            capture = await send(to, request)
            seen.append((due, outcome(capture), ttfp_s(capture)))
            if outcome(capture) == "failed":
                errors[f"{capture.status}: {capture.error}"] += 1

        async def watch() -> None:
            every_s = min(EVERY_S, seconds / 40)
            while (since := time.monotonic() - begun) < seconds:
                samples.append({"at_s": since, **await asyncio.to_thread(self.sample)})
                if len(samples) % 10 == 1:
                    results.progress(f"{self.name}: {since:.0f} s, {Counter(went for _, went, _ in seen)}")
                await asyncio.sleep(begun + every_s * len(samples) - time.monotonic())

        async with session(self.server.url) as to, asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            due = draws.expovariate(rate)
            while due < seconds:
                await asyncio.sleep(begun + due - time.monotonic())
                tasks.create_task(one(to, due, self.asked(f"{due:.3f}", draws)))
                due += draws.expovariate(rate)
        return {"samples": samples, "seen": seen, "errors": errors}


def outcome(capture: Capture) -> str:
    """How a request went."""
    if capture.status == 503:
        return "refused"
    if capture.aborted:
        return "left"
    return "served" if capture.succeeded and capture.audio else "failed"


async def run(name: str, folder: Path, rate: float | None, seconds: float, ready: asyncio.Barrier) -> Side:
    """One side from its start to its end; *rate* is the capacity, or None to measure it alone."""
    arm, times = SIDES[name]
    watched = Watched(name if rate else "bears", arm, folder)
    server, found = watched.server, dict[str, Any]()
    try:
        await asyncio.to_thread(server.start)
        server_arms.prove(server, arm, {"api"})
        warm = [watched.asked(f"w{each}", random.Random(each), leaves=0) for each in range(LIMIT)]
        whole_server.checked(await asyncio.to_thread(run_closed_loop, server.url, warm, SLOTS), audio=True)
        if rate is None:
            found["bears"] = await watched.bears()
        else:
            await asyncio.sleep(REST_S)
            found["before"] = watched.sample()
            await ready.wait()
            found |= await watched.load(times * rate, seconds)
            await asyncio.sleep(REST_S)
            found["after"] = watched.sample()
            server_arms.prove(server, arm, {"api"})
    finally:
        ended = await asyncio.to_thread(server.stop)
        left = watched.chunks()
        for entry in left:
            entry.unlink(missing_ok=True)
    return {**found, "shutdown": ended and dataclasses.asdict(ended), "left": [entry.name for entry in left]}


Growth = dict[tuple[str, str], tuple[float, float, float]]


def grown(side: Side) -> Growth:
    """By process and figure: what it was, what it came to, and by how much it grew.

    Counts at rest, before the load and after it; memory in the load's last three quarters.
    """
    from scipy.stats import theilslopes

    before, after = side["before"], side["after"]
    rows = {}
    later = side["samples"][len(side["samples"]) // 4 :]
    at_s = [each["at_s"] for each in later]
    for role, values in after["roles"].items():
        for figure in values:
            was, now = before["roles"][role][figure], values[figure]
            more = now - was
            if figure in MEMORY:
                line = [each["roles"][role][figure] for each in later]
                was, now, more = line[0], line[-1], theilslopes(line, at_s).slope * (at_s[-1] - at_s[0])
            rows[role, figure] = (was, now, more)
    for figure in ("chunks", "chunks of clients that left"):
        rows["all", figure] = (before[figure], after[figure], after[figure] - before[figure])
    return rows


def first_audio(side: Side, seconds: float) -> list[tuple[float, float]]:
    """Median and 99th percentile of the first audio of those that were served, by quarter of the load, milliseconds."""
    quarters: list[list[float]] = [[], [], [], []]
    for due, went, ttfp in side["seen"]:
        if went == "served":
            quarters[int(4 * due / seconds)].append(1000 * ttfp)
    return [(quantile(each, 0.5), quantile(each, 0.99)) for each in quarters]


def judge(sides: Mapping[str, Side], of: Mapping[str, Growth], seconds: float) -> list[str]:
    """Where the rule is broken, in words, by what grew of each side; the module says the rule."""
    stock, found = of[STOCK], []
    medians = {name: [median for median, _ in first_audio(side, seconds)] for name, side in sides.items()}
    drift = {name: each[3] / each[1] for name, each in medians.items()}
    for name in sides.keys() - {STOCK}:
        for (role, figure), (_, _, more) in of[name].items():
            theirs = max(0.0, stock[role, figure][2])
            if more > 1.5 * theirs + ALLOWED.get(figure, math.inf):
                found.append(f"{name}: {role}: {figure} grew by {more:.1f}, stock's by {theirs:.1f}")
        if drift[name] > 1.25 * max(1.0, drift[STOCK]):
            found.append(f"{name}: first audio came {drift[name]:.2f} times as late, stock's {drift[STOCK]:.2f} times")
        errors, killed = dict(sides[name]["errors"]), sides[name]["shutdown"]["killed"]
        if errors or killed:
            found.append(f"{name}: failed {errors}, killed {killed}")
    return found


def show(sides: Mapping[str, Side], of: Mapping[str, Growth], seconds: float) -> None:
    """The tables."""
    rows = []
    for role, figure in of[STOCK]:
        an_hour = 3600 / (0.75 * seconds) if figure in MEMORY else 1.0
        each = [side[role, figure] for side in of.values()]
        rows.append(
            [f"{role}: {figure}", *(f"{was:.1f} → {now:.1f} ({more * an_hour:+.1f})" for was, now, more in each)]
        )
    title = "Memory after the first quarter → at the end (growth of an hour); counts at rest before → after (growth)"
    results.show(title, ("process: figure", *sides), rows)
    went = {name: Counter(went for _, went, _ in side["seen"]) for name, side in sides.items()}
    rows = [[f"requests {how}", *(str(each[how]) for each in went.values())] for how in OUTCOMES]
    audio = [first_audio(side, seconds) for side in sides.values()]
    for number in range(4):
        texts = [f"{each[number][0]:.0f} / {each[number][1]:.0f}" for each in audio]
        rows.append([f"first audio p50 / p99 in quarter {number + 1}, ms", *texts])
    rows.append(["shutdown, s", *(f"{side['shutdown']['seconds']:.1f}" for side in sides.values())])
    rows.append(["chunks left after it", *(str(len(side["left"])) for side in sides.values())])
    results.show("Requests", ("", *sides), rows)


async def run_all(seconds: float) -> dict[str, Any]:
    """The configuration's capacity, and then all sides at once."""
    with tempfile.TemporaryDirectory() as folder:
        bears = (await run(STOCK, Path(folder), None, 0.0, asyncio.Barrier(1)))["bears"]
        results.progress(f"capacity: {bears:.2f} requests per second")
        ready = asyncio.Barrier(len(SIDES))
        async with asyncio.TaskGroup() as tasks:
            runs = {name: tasks.create_task(run(name, Path(folder), bears, seconds, ready)) for name in SIDES}
    return {"bears": bears, "seconds": seconds, "sides": {name: each.result() for name, each in runs.items()}}


def main() -> int:
    """Run it, keep the samples in ``results/``, print the tables; 1 where the rule is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.hours", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    seconds = 60 * parser.parse_args().minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    found = asyncio.run(run_all(seconds))
    results.save("trust-hours", found)
    of = {name: grown(side) for name, side in found["sides"].items()}
    show(found["sides"], of, seconds)
    broken = judge(found["sides"], of, seconds)
    print(*(broken or ["nothing of fastpath grows or gets later"]), about.line(), sep="\n")  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
