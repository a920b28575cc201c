"""Whether anything grows or slows down within an hour: ``python -m benchmarks.trust.hours``.

Three servers run at the same time, each with its own stage processes: stock and fastpath at 0.8 of the configuration's
capacity, and fastpath with ``--max-num-queued-reqs`` at 2.5 times the capacity, where most requests are refused.
Requests arrive in an open loop (Poisson) and ask for text and audio of many lengths. One client in five disconnects
before the end, some of them before the first piece. Steps are long and slots are few, so that the simulated device is
the limit and a server uses a fifth of a core.

Each process is sampled: memory (USS), threads, open descriptors, and the chunks in ``/dev/shm`` of clients that stayed.
(Upstream leaves chunks of clients that left, docs/upstream-defects.md.) The growth of memory is a Theil-Sen estimate
after the first quarter; the others are compared at rest, after some requests and after the load. The program exits with
1 if a figure of a fastpath server grew by more than 1.5 times stock's growth plus ``ALLOWED``, if first audio slowed
down by more than a quarter, a request failed, or a process had to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ab.capture import Request, chat_request, send, session
from benchmarks.rigs import about, results, server_arms, whole_server
from benchmarks.rigs.captures import quantile, run_closed_loop, ttfp_s
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import interrupted, parser
from benchmarks.server.arms import ARMS
from benchmarks.trust import FLAT, SHARED_MEMORY, segments

STEPS = {
    "*": FLAT,
    "thinker": {"base_ms": 120},
    "talker": {"base_ms": 100, "min_frames": 8, "max_frames": 30},
    "code2wav": {"base_ms": 80},
}
SLOTS, LIMIT, CAPACITY = 4, 8, 1.57
"""Requests per step of a stage, requests that a server with a limit admits, and requests per second of these steps."""
REST_S, SAMPLES = 15.0, 120
LEAVER = "leaves"

STOCK = "stock"
SIDES = {
    STOCK: (ARMS["poll"], 0.8),
    "fastpath": (ARMS["default"], 0.8),
    "beyond": (dataclasses.replace(ARMS["default"], arguments=("--max-num-queued-reqs", str(LIMIT))), 2.5),
}
"""The arm of each side, and its load as a multiple of the capacity."""
MEMORY, CHUNKS = "USS, MiB", "chunks"
ALLOWED = {MEMORY: 8.0, "threads": 2.0, "descriptors": 4.0, CHUNKS: 0.0}
"""Growth of a process that is allowed on top of one and a half times stock's."""

Sample = dict[tuple[str, str], float]
"""By process and figure."""


def _asked(name: str, number: int | str, draws: random.Random, leaves: float = 0.2) -> Request:
    after = draws.randint(0, 8) if draws.random() < leaves else None
    request_id = f"{name}-{'stays' if after is None else LEAVER}-{number}"
    body: dict[str, Any] = {"max_tokens": draws.randint(8, 30), "ignore_eos": True, "request_id": request_id}
    return chat_request(f"Question {number}", abort_after=after, **body)


def _sample(server: Server, name: str) -> Sample:
    found: Sample = {("all", CHUNKS): sum(LEAVER not in each for each in segments(name))}
    for pid, role in server.processes().items():
        with contextlib.suppress(psutil.Error):  # it may have ended
            process = psutil.Process(pid)
            found[role, MEMORY] = process.memory_full_info().uss / 2**20
            found[role, "threads"], found[role, "descriptors"] = process.num_threads(), process.num_fds()
    return found


async def _load(url: str, name: str, rate: float, seconds: float) -> list[tuple[float, str, float | None]]:
    """When each request was due, its outcome, and its seconds to first audio."""
    draws, begun = random.Random("an hour"), time.monotonic()
    seen: list[tuple[float, str, float | None]] = []

    async def one(due: float) -> None:
        capture = await send(to, _asked(name, f"{due:.3f}", draws))
        went = "refused" if capture.status == 503 else "left" if capture.aborted else f"failed: {capture.error}"
        seen.append((due, "served" if capture.succeeded and capture.audio else went, ttfp_s(capture)))

    async with session(url) as to, asyncio.TaskGroup() as tasks:
        due = draws.expovariate(rate)
        while due < seconds:
            await asyncio.sleep(begun + due - time.monotonic())
            tasks.create_task(one(due))
            due += draws.expovariate(rate)
    return seen


def run(side: str, folder: Path, seconds: float, ready: threading.Barrier) -> dict[str, Any]:
    """A side from its start to its end: ``growth`` by process and figure, what was ``seen``, ``killed``, ``left``."""
    arm, times = SIDES[side]
    name, samples, done = f"trust{os.getpid()}{side}", list[tuple[float, Sample]](), threading.Event()
    deploy = folder / f"{side}.yaml"
    text = whole_server.deploy("qwen3_omni.yaml").read_text()
    deploy.write_text(text.replace("max_num_seqs: 64", f"max_num_seqs: {SLOTS}"))

    def watch() -> None:
        while not done.wait(seconds / SAMPLES):
            samples.append((time.monotonic(), _sample(server, name)))

    with whole_server.server(arm, "qwen3_omni", deploy, {"stages": STEPS}) as server:
        server_arms.prove(server, arm, {"api"})
        warm = [_asked(name, f"w{each}", random.Random(each), leaves=0) for each in range(LIMIT)]
        whole_server.checked(run_closed_loop(server.url, warm, SLOTS), audio=True)
        ready.wait()
        time.sleep(REST_S)
        before, watching = _sample(server, name), threading.Thread(target=watch)
        watching.start()
        try:
            seen = asyncio.run(_load(server.url, name, times * CAPACITY, seconds))
        finally:
            done.set()
            watching.join()
        time.sleep(REST_S)
        after = _sample(server, name)
        server_arms.prove(server, arm, {"api"})
    assert server.shutdown is not None
    left = segments(name)
    for each in left:
        (SHARED_MEMORY / each).unlink(missing_ok=True)
    growth = {key: more - before[key] if key[1] != MEMORY else _slope(samples, key) for key, more in after.items()}
    return {"growth": growth, "seen": seen, "killed": server.shutdown.killed, "left": left}


def _slope(samples: list[tuple[float, Sample]], key: tuple[str, str]) -> float:
    """How much a figure grew from the end of the first quarter on."""
    from scipy.stats import theilslopes

    at_s, line = zip(*((at, sample[key]) for at, sample in samples[len(samples) // 4 :] if key in sample), strict=True)
    return float(theilslopes(line, at_s).slope * (at_s[-1] - at_s[0]))


def drift(side: Mapping[str, Any], seconds: float) -> float:
    """Median first audio of the last quarter as a multiple of the second's."""
    of = [
        [ttfp for due, went, ttfp in side["seen"] if went == "served" and int(4 * due / seconds) == n] for n in (1, 3)
    ]
    return quantile(of[1], 0.5) / quantile(of[0], 0.5)


def judge(sides: Mapping[str, Mapping[str, Any]], seconds: float) -> list[str]:
    """The violations of the rule in the module's docstring."""
    found, usual = [], drift(sides[STOCK], seconds)
    for name, side in sides.items():
        for (role, figure), more in side["growth"].items():
            theirs = max(0.0, sides[STOCK]["growth"][role, figure])
            if more > 1.5 * theirs + ALLOWED[figure]:
                found.append(f"{name}: {role}: {figure} grew by {more:.1f}, stock's by {theirs:.1f}")
        if drift(side, seconds) > 1.25 * max(1.0, usual):
            found.append(f"{name}: first audio slowed down by {drift(side, seconds):.2f}, stock's by {usual:.2f}")
        failed = [went for _, went, _ in side["seen"] if went.startswith("failed")]
        if failed or side["killed"]:
            found.append(f"{name}: failed {failed[:3]}, killed {side['killed']}")
    return [each for each in found if not each.startswith(STOCK)]


def main() -> int:
    """Run all sides at the same time and print what grew. The exit code is 1 if the rule is violated."""
    command = parser("benchmarks.trust.hours", __doc__)
    command.add_argument("--minutes", type=float, default=60.0)
    seconds = 60 * command.parse_args().minutes
    signal.signal(signal.SIGTERM, interrupted)
    ready = threading.Barrier(len(SIDES))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(run, name, Path(folder), seconds, ready) for name in SIDES}
    sides = {name: each.result() for name, each in runs.items()}
    rows = [
        [" ".join(key), *(f"{side['growth'][key]:+.1f}" for side in sides.values())] for key in sides[STOCK]["growth"]
    ]
    went = {name: Counter(went.split(":")[0] for _, went, _ in side["seen"]) for name, side in sides.items()}
    rows += [[how, *(str(each[how]) for each in went.values())] for how in ("served", "refused", "left", "failed")]
    rows.append(["chunks left after it", *(str(len(side["left"])) for side in sides.values())])
    results.show("Growth (memory after the first quarter); requests", ("", *sides), rows)
    broken = judge(sides, seconds)
    print(*(broken or ["fastpath does not grow or slow down more than allowed"]), about.line(), sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
