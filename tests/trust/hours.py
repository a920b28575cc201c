"""Whether anything grows or slows down within an hour: ``python -m tests.trust.hours``.

Three servers run at the same time, each with its own ports, folders and stage processes: stock and fastpath at 0.8 of
the configuration's capacity, and fastpath with ``--max-num-queued-reqs`` at 2.5 times the capacity, where most requests
are refused. Requests arrive in an open loop (Poisson) and ask for text and audio of many lengths. One client in five
disconnects before the end, some of them before the first piece. Steps are long and slots are few, so that the simulated
device is the limit and a server uses a fifth of a core.

Each process is sampled during the run: memory (USS, RSS), threads, open descriptors, asyncio tasks and blocks of
Python's allocator (by `counts`, a plugin in every arm). So are the server's chunks in ``/dev/shm``, whose names contain
the request's id. Chunks of clients that stayed and chunks of clients that left are counted separately. The rule ignores
the second kind, which upstream leaves behind too (docs/upstream-defects.md). The first quarter is warm-up. The slope of
memory is a Theil-Sen estimate over the remaining samples. Counts are compared at rest, after eight
warm-up requests and after the load.

The program exits with 1 if one of these is true of a fastpath server:

- A figure grew by more than 1.5 times stock's growth plus ``ALLOWED``.
- The ratio of median first audio, last quarter to second, is more than 1.25 and more than 1.25 times stock's.
- A request failed, or a process had to be killed.
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
from tests.trust import FLAT, SHARED_MEMORY, counts

STEPS = {
    "*": FLAT,
    "thinker": {"base_ms": 120},
    "talker": {"base_ms": 100, "min_frames": 8, "max_frames": 30},
    "code2wav": {"base_ms": 80},
}
SLOTS, LIMIT = 4, 8
"""Requests per step of a stage, and requests that a server with a limit admits."""
TOKENS = (8, 30)
LEAVES = 0.2
"""Share of the clients that disconnect before the end."""
LEAVER = "leaves"
EVERY_S = 30.0
REST_S = 15.0
"""Time after which no request of a load is in flight."""

STOCK = "stock"
SIDES: Mapping[str, tuple[ServerArm, float]] = {
    STOCK: (ARMS["poll"], 0.8),
    "fastpath": (ARMS["default"], 0.8),
    "beyond": (dataclasses.replace(ARMS["default"], arguments=("--max-num-queued-reqs", str(LIMIT))), 2.5),
}
"""The arm of each side, and its load as a multiple of the capacity."""
MEMORY = ("USS, MiB", "RSS, MiB", "blocks, 1000s")
ALLOWED = {"USS, MiB": 8, "blocks, 1000s": 20, "threads": 2, "descriptors": 4, "tasks": 2, "chunks": 0}
"""Growth of a process that is allowed on top of one and a half times stock's."""

OUTCOMES = ("served", "refused", "left", "failed")

Side = Mapping[str, Any]
"""The result of a side.

``before`` and ``after`` are samples at rest and ``samples`` those during the load, all from `Watched.sample`. ``seen``
has for each request the seconds into the load at which it was due, its outcome, and its seconds to first audio.
``errors`` has the errors of failed requests, ``shutdown`` how the server ended, and ``left`` the chunks that remained.
"""


class Watched:
    """The server of a side, with real stage processes, and what can be observed from outside."""

    def __init__(self, name: str, arm: ServerArm, folder: Path) -> None:
        self.name, self._plugin = f"trust{os.getpid()}{name}", folder / name
        deploy = folder / f"{name}.yaml"
        text = whole_server.deploy("qwen3_omni.yaml").read_text()
        deploy.write_text(text.replace("max_num_seqs: 64", f"max_num_seqs: {SLOTS}"))
        environment = {**whole_server.environment(arm, {"stages": STEPS}), **counts.plugin(self._plugin)}
        model = whole_server.model_folder("qwen3_omni")
        self.server = Server(model, deploy, environment=environment, arguments=arm.arguments)

    def asked(self, number: int | str, draws: random.Random, leaves: float = LEAVES) -> Request:
        """A request. *draws* determines its random values."""
        after = draws.randint(0, TOKENS[0]) if draws.random() < leaves else None
        body: dict[str, Any] = {
            "max_tokens": draws.randint(*TOKENS),
            "ignore_eos": True,
            "request_id": f"{self.name}-{LEAVER if after is not None else 'stays'}-{number}",
        }
        return chat_request(f"Question {number}", abort_after=after, **body)

    def chunks(self) -> list[Path]:
        """The chunks of its requests in ``/dev/shm``."""
        return [entry for entry in SHARED_MEMORY.iterdir() if self.name in entry.name]

    def sample(self) -> dict[str, Any]:
        """The current figures of each process, by its role, and the numbers of chunks in ``/dev/shm``."""
        roles: dict[str, dict[str, float]] = {}
        for pid, role in self.server.processes().items():
            process = psutil.Process(pid)
            with contextlib.suppress(psutil.Error):  # it may have ended
                memory = process.memory_full_info()
                values = {"USS, MiB": memory.uss / 2**20, "RSS, MiB": memory.rss / 2**20}
                values |= {"threads": process.num_threads(), "descriptors": process.num_fds()}
                roles[role] = {**values, **counts.read(self._plugin, pid)}
        names = [entry.name for entry in self.chunks()]
        left = sum(LEAVER in name for name in names)
        return {"roles": roles, "chunks": len(names) - left, "chunks of clients that left": left}

    async def capacity(self) -> float:
        """Requests per second that it answers while more requests are in flight than it has slots."""
        draws = random.Random("capacity")
        asked = [self.asked(f"b{number}", draws, leaves=0) for number in range(88)]
        captures = await asyncio.to_thread(run_closed_loop, self.server.url, asked, 2 * LIMIT)
        ends = sorted(each.started_at_s + each.e2e_s for each in captures)[LIMIT : -2 * LIMIT]
        return (len(ends) - 1) / (ends[-1] - ends[0])

    async def load(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send requests for *seconds* and take samples, then wait until the last request has ended."""
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
    """The outcome of a request, one of `OUTCOMES`."""
    if capture.status == 503:
        return "refused"
    if capture.aborted:
        return "left"
    return "served" if capture.succeeded and capture.audio else "failed"


async def run(name: str, folder: Path, rate: float | None, seconds: float, ready: asyncio.Barrier) -> Side:
    """One side from its start to its end. *rate* is the capacity, or None to measure only that."""
    arm, times = SIDES[name]
    watched = Watched(name if rate else "capacity", arm, folder)
    server, found = watched.server, dict[str, Any]()
    try:
        await asyncio.to_thread(server.start)
        server_arms.prove(server, arm, {"api"})
        warm = [watched.asked(f"w{each}", random.Random(each), leaves=0) for each in range(LIMIT)]
        whole_server.checked(await asyncio.to_thread(run_closed_loop, server.url, warm, SLOTS), audio=True)
        if rate is None:
            found["capacity"] = await watched.capacity()
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
    """The first value, the last value and the growth, by process and figure.

    Counts are those at rest, before the load and after it. Memory is that of the last three quarters of the load.
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
    """Median and 99th percentile of the first audio of served requests, in milliseconds, by quarter of the load."""
    quarters: list[list[float]] = [[], [], [], []]
    for due, went, ttfp in side["seen"]:
        if went == "served":
            quarters[int(4 * due / seconds)].append(1000 * ttfp)
    return [(quantile(each, 0.5), quantile(each, 0.99)) for each in quarters]


def judge(sides: Mapping[str, Side], of: Mapping[str, Growth], seconds: float) -> list[str]:
    """The violations of the rule in the module's docstring, from the growth of each side."""
    stock, found = of[STOCK], []
    medians = {name: [median for median, _ in first_audio(side, seconds)] for name, side in sides.items()}
    drift = {name: each[3] / each[1] for name, each in medians.items()}
    for name in sides.keys() - {STOCK}:
        for (role, figure), (_, _, more) in of[name].items():
            theirs = max(0.0, stock[role, figure][2])
            if more > 1.5 * theirs + ALLOWED.get(figure, math.inf):
                found.append(f"{name}: {role}: {figure} grew by {more:.1f}, stock's by {theirs:.1f}")
        if drift[name] > 1.25 * max(1.0, drift[STOCK]):
            found.append(f"{name}: first audio slowed down by {drift[name]:.2f}, stock's by {drift[STOCK]:.2f}")
        errors, killed = dict(sides[name]["errors"]), sides[name]["shutdown"]["killed"]
        if errors or killed:
            found.append(f"{name}: failed {errors}, killed {killed}")
    return found


def show(sides: Mapping[str, Side], of: Mapping[str, Growth], seconds: float) -> None:
    """Print the tables."""
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
    """Measure the configuration's capacity, and then run all sides at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        rate = (await run(STOCK, Path(folder), None, 0.0, asyncio.Barrier(1)))["capacity"]
        results.progress(f"capacity: {rate:.2f} requests per second")
        ready = asyncio.Barrier(len(SIDES))
        async with asyncio.TaskGroup() as tasks:
            runs = {name: tasks.create_task(run(name, Path(folder), rate, seconds, ready)) for name in SIDES}
    return {"capacity": rate, "seconds": seconds, "sides": {name: each.result() for name, each in runs.items()}}


def main() -> int:
    """Run it, save the samples in ``results/`` and print the tables. The exit code is 1 if the rule is violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.hours", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    seconds = 60 * parser.parse_args().minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with this process
    found = asyncio.run(run_all(seconds))
    results.save("trust-hours", found)
    of = {name: grown(side) for name, side in found["sides"].items()}
    show(found["sides"], of, seconds)
    broken = judge(found["sides"], of, seconds)
    print(*(broken or ["fastpath does not grow or slow down more than allowed"]), about.line(), sep="\n")  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
