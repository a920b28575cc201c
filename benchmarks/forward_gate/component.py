"""The talker's part and the orchestrator's part of its outputs, in this process."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rigs.engine_requests import engine_request

TOKENS = 900
TOGETHER = 32
"""Requests that end in one batch."""
WARM_UP = 8
"""Steps that are not counted: imports, caches and the prompts."""
PROMPT_TOKENS = 16


@dataclass
class Step:
    """What one step of the stage sends to the orchestrator."""

    frames: list[list[bytearray]]
    """Each message's, as they come out of the socket."""
    counted: bool
    """Whether it counts: not the first steps, and none in which requests end."""
    ends: int


@dataclass
class Spent:
    """Nanoseconds of a thread's processor time, over the counted steps."""

    update: int = 0
    encode: int = 0
    orchestrator: int = 0


def request_of(name: str, tokens: int) -> Any:
    """A request of so many tokens; detokenised text is left out, it is not what is measured."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    return engine_request(name, range(100, 100 + PROMPT_TOKENS), params)


def put_nowhere(*_: Any, **__: Any) -> tuple[bool, int, None]:
    """The next stage is not there: chunks are made, and not kept."""
    return True, 0, None


def produce(rig: Any, in_flight: int, spent: Spent) -> list[Step]:
    """Run the stage until its requests have ended, ``TOGETHER`` at a time in one batch."""
    from vllm.v1.serial_utils import MsgpackEncoder

    encoder = MsgpackEncoder()
    steps: list[Step] = []
    # The first look at the requests starts the fetching of their thinkers' rows, in a thread.
    assert not rig.schedule().num_scheduled_tokens
    time.sleep(3.0)
    while rig.scheduler.has_unfinished_requests():
        step = rig.execute(rig.schedule())
        rig.in_flight.pop()
        scheduled, output = step.scheduled, step.output()
        counted = WARM_UP <= len(steps) < TOKENS - 1
        started_ns = time.thread_time_ns()
        raws = list(rig.scheduler.update_from_output(scheduled, output).values())
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


def measure(in_flight: int) -> dict[str, Any]:
    """Figures of requests of ``TOKENS`` tokens and a few, so many in flight.

    First the stage, then, when nothing of it is left, the orchestrator's part: in a server they are two processes, and
    neither collects the other's garbage.
    """
    from vllm.utils.gc_utils import freeze_gc_heap  # as both processes do when they have started

    from benchmarks.save_queue.rig import Rig, stage_configs

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(stage_configs(Path(folder))[1], async_scheduling=False)
    rig.connector.put = put_nowhere
    registered = []
    for number in range(in_flight):
        name, tokens = f"gate{number:03}", TOKENS + 4 * (number // TOGETHER)
        rig.add(name, tokens=tokens)
        registered.append(request_of(name, tokens))
    spent = Spent()
    freeze_gc_heap()
    steps = produce(rig, in_flight, spent)
    rig.close()
    del rig
    freeze_gc_heap()
    found = consume(registered, steps, spent)
    count = found.pop("outputs")
    return found | {
        "bytes": found["bytes"] / count,
        "payload_bytes": found["payload_bytes"] / count,
        "orchestrator_us": spent.orchestrator / count / 1000,
        "scheduler_us": spent.update / count / 1000,
        "encode_us": spent.encode / count / 1000,
    }


def consume(registered: Sequence[Any], steps: Sequence[Step], spent: Spent) -> dict[str, Any]:
    """Decode and process each message as the orchestrator does, and look at what it then has."""
    from vllm.v1.metrics.stats import IterationStats
    from vllm.v1.serial_utils import MsgpackDecoder
    from vllm_omni.engine import OmniEngineCoreOutputs
    from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

    decoder = MsgpackDecoder(OmniEngineCoreOutputs)
    processor = MultimodalOutputProcessor(None, log_stats=True, engine_core_output_type="latent")
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
            payloads = [output.multimodal_output for output in decoded.outputs]
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
