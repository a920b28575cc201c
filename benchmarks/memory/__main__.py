"""``python -m benchmarks.memory``."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import benchmarks.memory
from benchmarks.memory.growth import Growth, growth
from benchmarks.rigs import results, user_arms, whole_server
from benchmarks.rigs.server import Server
from benchmarks.server.arms import ARMS, ServerArm, named
from benchmarks.server.load import Load
from benchmarks.server.measure import api_processes, serving
from omni_fastpath.tools.ab import about
from omni_fastpath.tools.ab.capture import Client

MINUTES = 60.0
STREAMS = 4
SAMPLES = 240
MIB = 2**20
USUAL = (ARMS["stock"], ARMS["only-gc_pacing"])


def main() -> None:
    """Run all arms at once and print a row for each."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=benchmarks.memory.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--streams", type=int, default=STREAMS, help="of each arm")
    parser.add_argument("--arms", type=named, default=USUAL, help=f"of {', '.join(ARMS)}, with commas")
    options = parser.parse_args()
    if options.minutes <= 0 or options.streams < 1:
        parser.error("--minutes: allowed are more than 0; --streams: 1 or more")
    about.commit()  # of the code that runs, whatever is committed meanwhile
    load = Load(levels=(options.streams,))
    model = whole_server.model_folder(load.model)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(options.arms)) as pool:
        runs = [pool.submit(_run, arm, load, model, Path(folder), options.minutes * 60) for arm in options.arms]
        found = {arm.name: run.result() for arm, run in zip(options.arms, runs, strict=True)}
    table = Table(title=f"{options.minutes:g} minutes of {options.streams} streams, {load}: the API process")
    for column in ("arm", "requests", "MiB after a quarter", "at the end", "most", "MiB an hour", "gc_pacing"):
        table.add_column(column, justify="left" if column in ("arm", "gc_pacing") else "right")
    for name, (requests, grown, counters) in found.items():
        figures = (grown.after_quarter, grown.end, grown.most, grown.per_hour)
        table.add_row(name, str(requests), *(f"{each:.1f}" for each in figures), counters or "-")
    Console(width=120).print(table)
    print(about.line())


def _run(arm: ServerArm, load: Load, model: Path, folder: Path, seconds: float) -> tuple[int, Growth, str]:
    """One arm's server under load: how many requests it answered, its memory, and the patch's counters."""
    with serving(arm, load, model, folder / f"{arm.name}.log") as server:
        samples, requests = asyncio.run(_serve(server, load, seconds))
        time.sleep(user_arms.STATE_FILES_SETTLE_S)
        records = [each.patches.get("gc_pacing") for each in server.snapshots().values()]
        counters = ", ".join(
            f"{name} {count}"
            for record in records
            if record is not None and record.state == "applied"
            for name, count in record.counters.items()
        )
    results.save("memory", {"arm": arm.name, "load": load, "samples": samples, "requests": requests})
    return requests, growth(samples), counters


async def _serve(server: Server, load: Load, seconds: float) -> tuple[list[tuple[float, float]], int]:
    """Keep the streams busy, and read the process's memory meanwhile: seconds and MiB."""
    begun, answered = time.monotonic(), 0
    (pid,) = api_processes(server)
    process = psutil.Process(pid)
    samples = []

    async def stream(number: int, client: Client) -> None:
        nonlocal answered
        while time.monotonic() - begun < seconds:
            # Lengths vary, so that streams do not fall into step and end together.
            length = Load(tokens=60 + 17 * ((answered + 5 * number) % 7))
            whole_server.checked([await client.send(length.asked(f"stream {number}, {answered}", 1)[0])], audio=True)
            answered += 1

    async def watch() -> None:
        while (since := time.monotonic() - begun) < seconds:
            memory = await asyncio.to_thread(process.memory_full_info)
            samples.append((since, memory.uss / MIB))
            await asyncio.sleep(seconds / SAMPLES)

    async with Client(server.url) as client:
        await asyncio.gather(watch(), *(stream(number, client) for number in range(int(load.levels[0]))))
    return samples, answered


if __name__ == "__main__":
    main()
