"""One arm in this process: ``python -m benchmarks.forward_gate.component --help``. Prints a JSON line."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.forward_gate.stages import OLD, STAGES, Stage, carriers
from benchmarks.rigs.results import say
from omni_fastpath.declare import Fit, Process, Wrap
from omni_fastpath.install import install
from omni_fastpath.patches.forward_gate import PATCH
from omni_fastpath.releases import installed_release
from omni_fastpath.tools.ab.arm import Arm, check, switch_on

ARMS = {
    arm.name: arm for arm in (Arm("stock"), Arm("fastpath", {"OMNI_FASTPATH_FORWARD_GATE": "1"}), Arm("stock again"))
}

TOKENS = 900
TOGETHER = 32
"""Requests that end in one batch."""
WARM_UP = 8
"""Steps that are not counted: imports, caches and the prompts."""


def install_arm(release: str, arm: Arm) -> None:
    """Make this process the arm, as a stage process does, and check it.

    The declaration's releases are those whose whole server was tried; a component of another one can still be measured.

    Raises:
        WrongArmError: The arm is not on, or something else is.
    """
    if release == OLD and arm.on:
        # The functions that are pinned came with the split; of the slots none has moved but in its body.
        slots = tuple(dataclasses.replace(s, fingerprints=()) for s in PATCH.fits[-1].seams if isinstance(s, Wrap))
        install(dataclasses.replace(PATCH, rows=(Fit(releases=(OLD,), seams=slots),)))
        check(arm, Process.STAGE)
    else:
        switch_on(arm, Process.STAGE)


def output_processor(release: str) -> Any:
    """The release's own, as the orchestrator makes it for a stage with latents."""
    if release == OLD:
        from vllm_omni.engine.output_processor import MultimodalOutputProcessor
    else:
        from vllm_omni.outputs.output_processor import MultimodalOutputProcessor
    return MultimodalOutputProcessor(None, log_stats=True, engine_core_output_type="latent")


@dataclasses.dataclass
class Step:
    """What one step of the stage sends to the orchestrator."""

    frames: list[list[bytearray]]
    """Each message's, as they come out of the socket."""
    counted: bool
    """Whether it counts: not the first steps, and none in which requests end."""
    ends: int


@dataclasses.dataclass
class Spent:
    """Nanoseconds of a thread's processor time, over the counted steps."""

    update: int = 0
    encode: int = 0
    orchestrator: int = 0


def produce(stage: Stage, in_flight: int, spent: Spent) -> list[Step]:
    """Run the stage until its requests have ended, ``TOGETHER`` at a time in one batch."""
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()
    steps: list[Step] = []
    stage.begin()
    while stage.scheduler.has_unfinished_requests():
        scheduled, output = stage.compute()
        counted = WARM_UP <= len(steps) < TOKENS - 1
        started_ns = time.thread_time_ns()
        raws = list(stage.scheduler.update_from_output(scheduled, output).values())
        updated_ns = time.thread_time_ns()
        encoded = [encoder.encode(raw) for raw in raws]
        if counted:
            spent.encode += time.thread_time_ns() - updated_ns
            spent.update += updated_ns - started_ns
        ends = sum(each.finished for raw in raws for each in raw.outputs)
        assert ends in (0, TOGETHER)
        # Copied, as by a socket: the buffers are those of the stage's tensors.
        steps.append(Step([[bytearray(frame) for frame in frames] for frames in encoded], counted, ends))
    assert sum(step.ends for step in steps) == in_flight
    return steps


def measure(release: str, folder: Path, in_flight: int) -> dict[str, Any]:
    """Figures of requests of ``TOKENS`` tokens and a few, so many in flight.

    First the stage, then, when nothing of it is left, the orchestrator's part: in a server they are two processes, and
    neither collects the other's garbage.
    """
    from vllm.utils.gc_utils import freeze_gc_heap  # as both processes do when they have started

    stage: Stage = STAGES[release](folder)
    registered = [stage.add(f"gate{n:03}", TOKENS + 4 * (n // TOGETHER)) for n in range(in_flight)]
    spent = Spent()
    freeze_gc_heap()
    steps = produce(stage, in_flight, spent)
    stage.close()
    del stage
    freeze_gc_heap()
    found = consume(release, registered, steps, spent)
    count = found.pop("outputs")
    return found | {
        "bytes": found["bytes"] / count,
        "payload_bytes": found["payload_bytes"] / count,
        "orchestrator_us": spent.orchestrator / count / 1000,
        "scheduler_us": spent.update / count / 1000,
        "encode_us": spent.encode / count / 1000,
    }


def consume(release: str, registered: Sequence[Any], steps: Sequence[Step], spent: Spent) -> dict[str, Any]:
    """Decode and process each message as the orchestrator does, and look at what it then has."""
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm_omni.engine import OmniEngineCoreOutputs

    decoder, processor = MsgpackDecoder(OmniEngineCoreOutputs), output_processor(release)
    for request in registered:
        processor.add_request(request, None)
    found = {"outputs": 0, "bytes": 0, "payload_bytes": 0}
    totals = {"generated": 0, "prompt": 0, "finished": 0, "messages": 0}
    seen, stall_ns = hashlib.sha256(), 0
    for step in steps:
        for frames in step.frames:
            size, statistics = sum(len(frame) for frame in frames), IterationStats()
            started_ns = time.thread_time_ns()
            decoded = decoder.decode(frames)
            payloads = [getattr(output, name) for output in decoded.outputs for name in carriers(release)]
            processed = processor.process_outputs(decoded.outputs, decoded.timestamp, statistics)
            spent_ns = time.thread_time_ns() - started_ns
            if step.ends:
                stall_ns = max(stall_ns, spent_ns)  # nobody else is served for so long
            if step.counted:
                spent.orchestrator += spent_ns
                found["outputs"] += len(decoded.outputs)
                found["bytes"] += size
                found["payload_bytes"] += sum(t.nbytes for payload in payloads if payload for t in payload.values())
            for output in processed.request_outputs:
                (completion,) = output.outputs
                message = (output.request_id, list(completion.token_ids), completion.finish_reason, output.finished)
                seen.update(repr(message).encode())
            totals["messages"] += len(processed.request_outputs)
            totals["generated"] += statistics.num_generation_tokens
            totals["prompt"] += statistics.num_prompt_tokens
            totals["finished"] += len(statistics.finished_requests)
    return {**found, "stall_ms": stall_ns / 1e6, "totals": totals, "messages": seen.hexdigest()}


def main() -> None:
    """Measure, and assert that the arm was what it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", choices=STAGES, required=True)
    parser.add_argument("--configs", type=Path, required=True, help="folder that stages.py has filled")
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--in-flight", type=int, nargs="+", required=True)
    options = parser.parse_args()
    import vllm_omni

    assert installed_release() == options.release, (installed_release(), vllm_omni.__file__)
    arm = ARMS[options.arm]
    install_arm(options.release, arm)
    found = {str(count): measure(options.release, options.configs, count) for count in options.in_flight}
    counters = check(arm, Process.STAGE)
    if arm.on:
        carrier = carriers(options.release)[0].removesuffix("_output")
        assert counters[PATCH.name][f"{carrier}_outputs"] >= TOKENS * sum(options.in_flight), counters
    say(found)
    os._exit(0)  # threads of upstream's that nobody joins can end the interpreter's own way out with SIGABRT


if __name__ == "__main__":
    main()
