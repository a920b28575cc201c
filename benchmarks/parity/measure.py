"""One start: the server, its warm-up, the bench, the capture client, and what each brought."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parity.figures import Start
from benchmarks.parity.load import BASE, REPLICAS, STAGES, Load
from benchmarks.parity.server import KilledServer
from benchmarks.rigs import bench, server_arms, user_arms
from benchmarks.rigs.samples import sample
from benchmarks.rigs.side_by_side import served, succeeded
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.capture import Capture, run_closed_loop, run_open_loop
from omni_fastpath.tools.ab.errors import MeasureError
from omni_fastpath.tools.ab.phases import Phases

_SAMPLE_EVERY_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """Everything that one start brought."""

    start: Start
    captures: Sequence[Capture]
    proof: user_arms.Proof
    moved: Mapping[str, Mapping[str, int]]
    """Fastpath: how far its counters moved during warm-up, bench and capture."""
    bench: Mapping[str, Any]


class CpuMeter:
    """Processor time of a server over time, so that it can be read for a load whose bounds are known afterwards.

    Upstream's bench client takes ten seconds to import and end, in which the server idles; that is not the load.
    """

    def __init__(self, server: KilledServer) -> None:
        self._server = server
        self._times: list[float] = []
        self._used: list[dict[str, float]] = []
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Sample meanwhile."""
        thread = threading.Thread(target=self._sample, daemon=True)
        self._read()
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._read()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._read()

    def _read(self) -> None:
        used = self._server.cpu_seconds()
        self._times.append(time.perf_counter())
        self._used.append(used)

    def between(self, begun: float, ended: float) -> dict[str, float]:
        """Processor seconds by role from *begun* to *ended*, ``time.perf_counter`` seconds."""
        if not self._times[0] <= begun < ended <= self._times[-1]:
            raise MeasureError(
                f"the bench says it ran from {begun:.1f} to {ended:.1f}, which is not within the time of its process, "
                f"{self._times[0]:.1f} to {self._times[-1]:.1f}"
            )
        return {role: self._at(ended, role) - self._at(begun, role) for role in sorted(self._used[-1])}

    def _at(self, moment: float, role: str) -> float:
        after = min(max(bisect.bisect_left(self._times, moment), 1), len(self._times) - 1)
        left, right = self._times[after - 1], self._times[after]
        low, high = (self._used[place].get(role, 0.0) for place in (after - 1, after))
        return low + (high - low) * ((moment - left) / (right - left) if right > left else 0.0)


def run_start(title: str, arm: Arm, load: Load, *, model: Path, work: Path, log: Path, phases: Phases) -> Outcome:
    """Start the arm's server, prove that it is that arm, load it twice, and stop it, whatever happens.

    Raises:
        WrongArmError: The server is not what its arm says.
        ServerError: It did not start, or ended early.
        BenchError: The bench client failed.
        MeasureError: A measurement could not be made.
    """
    server = KilledServer(
        model,
        user_arms.deploy_config(arm, BASE, work),
        temporary=work / "tmp",
        log=log,
        values=user_arms.environment(arm, load.device, work / "tmp"),
    )
    roles = server_arms.roles(STAGES, REPLICAS)
    with served(server, title, "seven processes", phases):
        with phases.phase(f"{title}: proof of the arm, warm-up"):
            before = user_arms.prove(server, arm, roles)
            warm = succeeded("warm-up", run_closed_loop(server.url, load.warm_up_requests(), load.concurrency))
        with phases.phase(f"{title}: vllm bench serve --omni, {load.requests} requests"):
            result, cpu = _bench(server, load, work, title)
        with phases.phase(f"{title}: capture client, {load.requests} requests"):
            captures = run_closed_loop(server.url, load.capture_requests(), load.concurrency)
        with phases.phase(f"{title}: capture client, {load.paced} requests at {load.rate:g} a second"):
            paced = run_open_loop(server.url, load.paced_requests(), load.rate)
        with phases.phase(f"{title}: proof of the arm after the load"):
            time.sleep(user_arms.STATE_FILES_SETTLE_S)
            after = user_arms.prove(server, arm, roles)
            sent = len(warm) + load.requests + len(captures) + len(paced)
            moved = user_arms.check_engaged(before, after, sent) if arm.on else {}
    assert server.start_s is not None
    start = Start(
        arm=arm.name,
        throughput=float(result.data["request_throughput"]),
        failed=int(result.data["failed"]),
        duration_s=float(result.data["duration"]),
        cpu_s=cpu,
        samples=[sample(capture) for capture in captures],
        start_s=server.start_s,
        paced=[sample(capture) for capture in paced],
    )
    return Outcome(start, captures, after, moved, _without_lists(result.data))


def _bench(server: KilledServer, load: Load, work: Path, title: str) -> tuple[bench.BenchResult, dict[str, float]]:
    meter = CpuMeter(server)
    with meter.running():
        result = bench.run(
            server,
            work / "bench",
            prompts=load.requests,
            max_concurrency=load.concurrency,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            seed=load.seed,
            name=title.replace(" ", "-"),
            arguments=["--ignore-eos"],
        )
    begun = min(result.data["start_times"])
    return result, meter.between(begun, begun + float(result.data["duration"]))


def _without_lists(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if not isinstance(value, list)}
