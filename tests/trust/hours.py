"""Does anything grow, or get later, within an hour? ``python -m tests.trust.hours``.

Whole servers at the same time, each with ports, folders and real stage processes of its own: stock and fastpath at 0.8
of what the configuration bears, and fastpath with ``--max-num-queued-reqs`` at 2.5 times that, where most are refused.
Requests arrive in an open loop (Poisson), with text and audio, of many lengths; one client in five leaves in the
middle, some before the first piece. Steps are long and slots are few, so that the simulated device is what limits, and
a server takes a fifth of a core.

Sampled through the run, by process: memory (USS, RSS), threads, open descriptors, asyncio tasks and blocks that
Python's allocator has given out (`counts`, a plugin in every arm); and what of the server's requests lies in
``/dev/shm``, where chunks bear their requests' names. The first quarter is warming up. Memory's slope is Theil and
Sen's through what follows. Counts are compared at rest: before the load, after eight requests, and after it.

The rule, by which it exits with 1: something of fastpath grows by more than one and a half times what the same grows by
of stock and ``ALLOWED`` more; or its median first audio rises from the second quarter to the last by a quarter more
than stock's does; or one of its requests failed, or a process had to be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
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
from tests.trust import counts

STEPS = {
    "thinker": {"base_ms": 120},
    "talker": {"base_ms": 100, "min_frames": 8, "max_frames": 30},
    "code2wav": {"base_ms": 80},
}
SLOTS = 4
"""Requests in a step of a stage."""
TOKENS = (8, 30)
LIMIT = 8
LEAVES = 0.2
"""Share of the clients that close the connection before the end."""
EVERY_S = 30.0
REST_S = 15.0
"""After which nothing of a load is under way."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)

MEMORY = ("USS, MiB", "blocks, 1000s")
COUNTS = ("threads", "descriptors", "tasks")
ALLOWED: Mapping[str, float] = {
    "USS, MiB": 8,
    "blocks, 1000s": 20,
    "threads": 2,
    "descriptors": 4,
    "tasks": 2,
    "chunks": 4,
}
"""How much more than one and a half times stock's growth is no matter, each of a process."""


@dataclasses.dataclass(frozen=True)
class Side(ServerArm):
    """An arm, and how many times what it bears it is asked."""

    load: float = 0.8


def _side(arm: str, load: float, *arguments: str) -> Side:
    return Side(**{**vars(ARMS[arm]), "arguments": arguments}, load=load)


SIDES: Mapping[str, Side] = {
    "stock": _side("stock", 0.8),
    "fastpath": _side("fastpath", 0.8),
    "beyond": _side("fastpath", 2.5, "--max-num-queued-reqs", str(LIMIT)),
}
STOCK = "stock"


class Watched:
    """A side's server on real stage processes, and what can be seen of it from outside.

    Attributes:
        server: It.
        tag: Begins the names of its requests, and so those of its chunks.
        seen: Of each request: when it began (seconds into the load), how it went, seconds to its first audio.
        errors: What those that failed were told.
        samples: Of the load; `sample` says what is in one.
    """

    def __init__(self, name: str, side: Side, folder: Path) -> None:
        self.side, self.tag = side, f"trust{os.getpid()}{name}"
        self.seen: list[tuple[float, str, float | None]] = []
        self.errors: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []
        self._plugin = folder / name
        text = whole_server.deploy("qwen3_omni.yaml").read_text()
        deploy = folder / f"{name}.yaml"
        deploy.write_text(text.replace("max_num_seqs: 64", f"max_num_seqs: {SLOTS}"))
        self.server = Server(
            whole_server.model_folder("qwen3_omni"),
            deploy,
            environment={**whole_server.environment(side, STEPS), **counts.plugin(self._plugin)},
            arguments=side.arguments,
            log_path=results.FOLDER.resolve() / f"trust-hours-{name}.log",
        )

    def asked(self, number: int | str, draws: random.Random) -> Request:
        """A request of the load."""
        leaves = draws.randint(0, TOKENS[0]) if draws.random() < LEAVES else None
        tokens = draws.randint(*TOKENS)
        name = f"{self.tag}-{number}"
        return chat_request(
            f"Question {number}", abort_after=leaves, max_tokens=tokens, ignore_eos=True, request_id=name
        )

    def sample(self) -> dict[str, Any]:
        """What there is now: of each process, by its role, and of its requests in ``/dev/shm``."""
        found: dict[str, Any] = {"roles": {}}
        for pid, role in self.server.processes().items():
            process, told = psutil.Process(pid), counts.read(self._plugin, pid)
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                memory = process.memory_full_info()
                found["roles"][role] = {
                    "USS, MiB": memory.uss / 2**20,
                    "RSS, MiB": memory.rss / 2**20,
                    "threads": process.num_threads(),
                    "descriptors": process.num_fds(),
                    **({"tasks": told["tasks"], "blocks, 1000s": told["blocks"] / 1000} if told else {}),
                }
        entries = self.entries()
        found |= {"chunks": len(entries), "chunks, MiB": sum(map(_size, entries)) / 2**20}
        return found

    def entries(self) -> list[Path]:
        """What lies in ``/dev/shm`` of its requests."""
        return [entry for entry in SHARED_MEMORY.iterdir() if self.tag in entry.name]

    async def load(self, rate: float, seconds: float) -> None:
        """Requests for so long, and samples meanwhile, until the last request has ended."""
        draws, begun = random.Random("an hour"), time.monotonic()
        every_s = min(EVERY_S, seconds / 40)

        async def one(to: aiohttp.ClientSession, due: float, request: Request) -> None:
            capture = await send(to, request)
            went = outcome(capture)
            if went == "failed":
                self.errors[f"{capture.status}: {capture.error}"] += 1
            self.seen.append((due, went, ttfp_s(capture)))

        async def watch() -> None:
            while (since := time.monotonic() - begun) < seconds:
                self.samples.append({"at_s": since, **await asyncio.to_thread(self.sample)})
                if len(self.samples) % 10 == 1:
                    results.progress(f"{self.tag}: {since:.0f} s, {Counter(went for _, went, _ in self.seen)}")
                await asyncio.sleep(begun + every_s * len(self.samples) - time.monotonic())

        async with session(self.server.url) as to, asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            due, number = draws.expovariate(rate), 0
            while due < seconds:
                await asyncio.sleep(begun + due - time.monotonic())
                tasks.create_task(one(to, due, self.asked(number, draws)))
                due, number = due + draws.expovariate(rate), number + 1


def outcome(capture: Capture) -> str:
    """How a request went."""
    if capture.status == 503:
        return "refused"
    if capture.aborted:
        return "left"
    return "served" if capture.succeeded and capture.audio else "failed"


def _size(entry: Path) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # taken meanwhile
        return 0


async def run(name: str, side: Side, folder: Path, rate: float | None, seconds: float, ready: asyncio.Barrier) -> Any:
    """One side from its start to its end; *rate* is what it bears, None: say that and no more."""
    watched = Watched(name, side, folder)
    server = watched.server
    try:
        await asyncio.to_thread(server.start)
        server_arms.prove(server, side, {"api"})
        draws = random.Random("warming up")
        warm = [dataclasses.replace(watched.asked(f"w{each}", draws), abort_after=None) for each in range(96)]
        whole_server.checked(await asyncio.to_thread(run_closed_loop, server.url, warm[:8], 4), audio=True)
        if rate is None:
            captures = await asyncio.to_thread(run_closed_loop, server.url, warm[8:], 2 * LIMIT)
            ends = sorted(each.started_at_s + each.e2e_s for each in captures)[LIMIT : -2 * LIMIT]
            return (len(ends) - 1) / (ends[-1] - ends[0])
        await asyncio.sleep(REST_S)
        before = watched.sample()
        await ready.wait()
        await watched.load(side.load * rate, seconds)
        await asyncio.sleep(REST_S)
        after = watched.sample()
        server_arms.prove(server, side, {"api"})
    finally:
        ended = await asyncio.to_thread(server.stop)
        left = watched.entries()
        for entry in left:
            entry.unlink(missing_ok=True)
    shutdown = {"shutdown": ended, "left": [entry.name for entry in left]}
    return {
        "before": before,
        "after": after,
        **shutdown,
        **{k: vars(watched)[k] for k in ("samples", "seen", "errors")},
    }


def grown(found: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, float, float]]:
    """By process and figure: what it was, what it came to, by how much that is more; memory in the last three quarters.

    Of counts: at rest, before and after the load.
    """
    from scipy.stats import theilslopes

    rows = {}
    before, after = found["before"], found["after"]
    later = found["samples"][len(found["samples"]) // 4 :]
    for role, values in after["roles"].items():
        for figure in MEMORY:
            line = [
                (each["at_s"], each["roles"][role][figure]) for each in later if figure in each["roles"].get(role, {})
            ]
            if len(line) > 3:
                at_s, ys = zip(*line, strict=True)
                third = len(ys) // 3
                ends = statistics.median(ys[:third]), statistics.median(ys[-third:])
                rows[role, figure] = (*ends, float(theilslopes(ys, at_s).slope) * (at_s[-1] - at_s[0]))
        for figure in COUNTS:
            if figure in values:
                was = before["roles"].get(role, {}).get(figure, 0)
                rows[role, figure] = (was, values[figure], values[figure] - was)
    for figure in ("chunks", "chunks, MiB"):
        rows["all", figure] = (before[figure], after[figure], after[figure] - before[figure])
    return rows


def first_audio(found: Mapping[str, Any], seconds: float) -> list[tuple[float, float]]:
    """Median and 99th percentile of the first audio of those that were served, by quarter of the load, milliseconds."""
    quarters: list[list[float]] = [[], [], [], []]
    for due, went, ttfp in found["seen"]:
        if went == "served":
            quarters[int(4 * due / seconds)].append(1000 * ttfp)
    return [(quantile(each, 0.5), quantile(each, 0.99)) for each in quarters]


def judge(sides: Mapping[str, Mapping[str, Any]], seconds: float) -> list[str]:
    """Where the rule is broken, in words; the module says the rule."""
    stock, found = grown(sides[STOCK]), []
    medians = {name: [median for median, _ in first_audio(side, seconds)] for name, side in sides.items()}
    drift = {name: each[3] / each[1] for name, each in medians.items()}
    for name, side in sides.items():
        if name == STOCK:
            continue
        for (role, figure), (_, _, more) in grown(side).items():
            theirs = max(0.0, stock.get((role, figure), (0, 0, 0))[2])
            if figure in ALLOWED and more > 1.5 * theirs + ALLOWED[figure]:
                found.append(f"{name}: {role}: {figure} grew by {more:.1f}, stock's by {theirs:.1f}")
        if drift[name] > 1.25 * max(1.0, drift[STOCK]):
            found.append(f"{name}: first audio came {drift[name]:.2f} times as late, stock's {drift[STOCK]:.2f} times")
        if side["errors"] or side["shutdown"].killed:
            found.append(f"{name}: failed {dict(side['errors'])}, killed {side['shutdown'].killed}")
    return found


def show(sides: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
    """The tables."""
    of = {name: grown(side) for name, side in sides.items()}
    rows = []
    for role, figure in of[STOCK]:
        cells = [of[name].get((role, figure)) for name in sides]
        an_hour = 3600 / (0.75 * seconds) if figure in MEMORY else 1.0
        texts = ["-" if each is None else f"{each[0]:.1f} → {each[1]:.1f} ({each[2] * an_hour:+.1f})" for each in cells]
        rows.append([f"{role}: {figure}", *texts])
    title = "Memory: second quarter → last (an hour's growth by Theil and Sen); counts: at rest before → after"
    results.show(title, ("process: figure", *sides), rows)
    rows = []
    for went in ("served", "refused", "left", "failed"):
        rows.append(
            [f"requests {went}", *(str(sum(each[1] == went for each in side["seen"])) for side in sides.values())]
        )
    for quarter in range(4):
        texts = ["{:.0f} / {:.0f}".format(*first_audio(side, seconds)[quarter]) for side in sides.values()]
        rows.append([f"first audio p50 / p99 of quarter {quarter + 1}, ms", *texts])
    rows.append(["shutdown, s", *(f"{side['shutdown'].seconds:.1f}" for side in sides.values())])
    rows.append(["left in /dev/shm after it", *(str(len(side["left"])) for side in sides.values())])
    results.show("Requests", ("", *sides), rows)


async def run_all(sides: Sequence[str], seconds: float) -> dict[str, Any]:
    """What the configuration bears, and then all sides at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        bears = await run("bears", SIDES[STOCK], path, None, 0.0, asyncio.Barrier(1))
        results.progress(f"it bears {bears:.2f} requests a second")
        ready = asyncio.Barrier(len(sides))
        async with asyncio.TaskGroup() as tasks:
            runs = {name: tasks.create_task(run(name, SIDES[name], path, bears, seconds, ready)) for name in sides}
    return {"bears": bears, "seconds": seconds, "sides": {name: each.result() for name, each in runs.items()}}


def main() -> int:
    """Run it, keep the samples, print the tables; 1 where something of fastpath grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.hours", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--arms", default=",".join(SIDES), help=f"of {', '.join(SIDES)}; {STOCK} must be one")
    options = parser.parse_args()
    names = options.arms.split(",")
    if STOCK not in names or set(names) - set(SIDES) or options.minutes <= 0:
        parser.error(f"--arms: of {', '.join(SIDES)}, {STOCK} among them; --minutes: more than 0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    results.FOLDER.mkdir(exist_ok=True)
    found = asyncio.run(run_all(names, 60 * options.minutes))
    text = json.dumps({"about": about.about(), **found}, default=dataclasses.asdict)
    (results.FOLDER / "trust-hours.json").write_text(text)
    show(found["sides"], found["seconds"])
    broken = judge(found["sides"], found["seconds"])
    print(*(broken or ["nothing of fastpath grows or gets later"]), about.line(), sep="\n")  # noqa: T201
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
