"""One start of an arm's server: a stream alone, waves of streams, and the same arrivals for both arms."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo.load import Load
from benchmarks.rigs import user_arms, whole_server
from benchmarks.rigs.samples import Sample, Wave, in_wave, sample, times
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import served, succeeded
from benchmarks.server.measure import kept_time
from omni_fastpath.tools.ab.answers import Answers
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.capture import Capture, run_closed_loop, run_open_loop
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.quantiles import quantile
from omni_fastpath.tools.ab.verdict import Measure

ROLES = frozenset({"api"})
"""Who must have a state file: light engines hold nothing that could be patched."""


@dataclass(frozen=True)
class Start:
    """What one start gave.

    Attributes:
        arm: ``stock`` or ``fastpath``.
        alone: Requests one after another.
        waves: Of the closed loop.
        paced: Of the open loop.
        throughput: Requests a second of the closed loop.
        cpu_ms: Processor time of the API process a request of the closed loop, milliseconds.
        start_s: How long the server took to be ready.
        engines: How well the light engines kept time, by engine: one that was late measured itself.
        proof: What the server's state files said after the load.
        moved: Fastpath: how far its counters moved meanwhile.
    """

    arm: str
    alone: Sequence[Sample]
    waves: Sequence[Sample]
    paced: Sequence[Sample]
    throughput: float
    cpu_ms: float
    start_s: float
    engines: Mapping[str, Mapping[str, float]]
    proof: user_arms.Proof
    moved: Mapping[str, Mapping[str, int]]


def run_start(
    title: str, arm: Arm, load: Load, *, model: Path, work: Path, log: Path, phases: Phases
) -> tuple[Start, Answers]:
    """Start the arm's server, prove that it is that arm, load it, prove it again, and stop it, whatever happens.

    Returns:
        The start, and what its requests were answered.

    Raises:
        WrongArmError: The server is not what the arm says, or its patches did not take effect.
        ServerError: It did not start.
        MeasureError: A request failed, or the server ended.
    """
    import omni_simulated_device

    temporary = work / "tmp"
    temporary.mkdir(mode=0o700, exist_ok=True)
    environment = user_arms.environment(arm, load.device, temporary)
    environment[omni_simulated_device.ENABLE_VARIABLE] = "light"
    deploy = user_arms.deploy_config(arm, whole_server.deploy(load.deploy), work)
    server = Server(model, deploy, environment=environment, log_path=log)
    with served(server, title, "API server and light engines", phases):
        with phases.phase(f"{title}: proof of the arm, warm-up, {load.alone} requests alone"):
            before = user_arms.prove(server, arm, ROLES)
            warm = succeeded("warm-up", run_closed_loop(server.url, load.requests("warm", 8), 8))
            alone = succeeded("alone", run_closed_loop(server.url, load.requests("alone", load.alone)))
        count = load.streams * load.waves
        with phases.phase(f"{title}: {count} requests, {load.streams} at a time"):
            used = server.cpu_seconds()["api"]
            waves = succeeded("waves", run_closed_loop(server.url, load.requests("waves", count), load.streams))
            used = server.cpu_seconds()["api"] - used
        with phases.phase(f"{title}: {load.paced} requests, {load.rate:g} a second"):
            paced = succeeded("paced", run_open_loop(server.url, load.requests("paced", load.paced), load.rate))
        with phases.phase(f"{title}: proof of the arm after the load"):
            time.sleep(user_arms.STATE_FILES_SETTLE_S)
            proof = user_arms.prove(server, arm, ROLES)
            sent = len(warm) + len(alone) + len(waves) + len(paced)
            moved = user_arms.check_engaged(before, proof, sent) if arm.on else {}
    assert server.start_s is not None
    start = Start(
        arm=arm.name,
        alone=_samples(alone),
        waves=_samples(waves),
        paced=_samples(paced),
        throughput=len(waves) / _lasted_s(waves),
        cpu_ms=1000 * used / len(waves),
        start_s=server.start_s,
        engines=kept_time(server.log_text()),
        proof=proof,
        moved=moved,
    )
    return start, [each.answer() for each in (*alone, *waves, *paced)]


def _samples(captures: Sequence[Capture]) -> list[Sample]:
    return [sample(capture) for capture in captures]


def _lasted_s(captures: Sequence[Capture]) -> float:
    return max(each.started_at_s + each.e2e_s for each in captures) - min(each.started_at_s for each in captures)


# ---- The rows ----


def measures(load: Load) -> list[Measure]:
    """Every row of the table, in its order."""
    alone, paced = "one stream alone", f"the same arrivals for both, {load.rate:g} requests a second (open loop)"
    waves = f"{load.streams} streams, {load.waves} waves (closed loop)"

    def wave(start: Start, which: Wave, share: float) -> float:
        return _ms(in_wave(start.waves, which, load.streams), "ttfp", share)

    return [
        Measure(alone, "TTFP p50", "ms", "lower", lambda start: _ms(start.alone, "ttfp", 0.5), judged=True),
        Measure(alone, "first text p50", "ms", "lower", lambda start: _ms(start.alone, "ttft", 0.5)),
        Measure(alone, "end to end p50", "ms", "lower", lambda start: _ms(start.alone, "e2e", 0.5), judged=True),
        Measure(waves, "TTFP first wave p50", "ms", "lower", lambda start: wave(start, "first", 0.5)),
        Measure(waves, "TTFP later waves p50", "ms", "lower", lambda start: wave(start, "later", 0.5), judged=True),
        Measure(waves, "TTFP later waves p99", "ms", "lower", lambda start: wave(start, "later", 0.99), primary=True),
        Measure(waves, "first text p50", "ms", "lower", lambda start: _ms(start.waves, "ttft", 0.5)),
        Measure(waves, "end to end p50", "ms", "lower", lambda start: _ms(start.waves, "e2e", 0.5), judged=True),
        Measure(waves, "largest gap p50", "ms", "lower", lambda start: _ms(start.waves, "gap", 0.5)),
        Measure(waves, "audio ran dry p99", "ms", "lower", lambda start: _ms(start.waves, "dry", 0.99)),
        Measure(waves, "throughput", "req/s", "higher", lambda start: start.throughput, 1, judged=True),
        Measure(waves, "API process, CPU a request", "ms", "lower", lambda start: start.cpu_ms),
        Measure(paced, "TTFP p50", "ms", "lower", lambda start: _ms(start.paced, "ttfp", 0.5), judged=True),
        Measure(paced, "TTFP p90", "ms", "lower", lambda start: _ms(start.paced, "ttfp", 0.9), judged=True),
        Measure(paced, "first text p50", "ms", "lower", lambda start: _ms(start.paced, "ttft", 0.5)),
        Measure(paced, "end to end p50", "ms", "lower", lambda start: _ms(start.paced, "e2e", 0.5), judged=True),
        Measure(paced, "largest gap p50", "ms", "lower", lambda start: _ms(start.paced, "gap", 0.5)),
        Measure(paced, "audio ran dry p99", "ms", "lower", lambda start: _ms(start.paced, "dry", 0.99)),
    ]


def _ms(samples: Sequence[Sample], name: str, share: float) -> float:
    return 1000 * quantile(times(samples, name), share)
