"""``forward_gate``: a step of a stage that sends chunks to the next one, and what the orchestrator receives of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .conftest import Measured, Stages

ROUNDS = 40


@pytest.mark.parametrize("streams", [1, 16, 64])
def test_step(measured: Measured, stages: Stages, streams: int) -> None:
    """One entry of ``update_from_output``, in a step with that number of streams and 16 codes for each."""
    with stages(streams) as stage:

        def once() -> float:
            scheduled = stage.scheduler.schedule()
            answer = stage.answer(scheduled)
            began = time.thread_time()
            stage.scheduler.update_from_output(scheduled, answer)
            return (time.thread_time() - began) / streams

        measured(once, ROUNDS)


@pytest.mark.parametrize("streams", [1, 16, 64])
def test_received(measured: Measured, benchmark: BenchmarkFixture, stages: Stages, arm: str, streams: int) -> None:
    """One entry of the stage's raw output, decoded and processed on the orchestrator's thread."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm_omni.engine import OmniEngineCoreOutputs
    from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(OmniEngineCoreOutputs)
    processor = MultimodalOutputProcessor(None, log_stats=True, engine_core_output_type="latent")
    with stages(streams) as stage:
        for name in stage.scheduler.requests:
            processor.add_request(_registered(name), None)
        raws = list(_raw_outputs(stage))
    has_codes = ["codes.audio" in (each.multimodal_output or {}) for raw in raws for each in raw.outputs]
    assert has_codes == [arm == "stock"] * len(has_codes)
    # Copied, as a socket does, because the frames share memory with the tensors of the stage.
    received = iter([[bytearray(frame) for frame in encoder.encode(raw)] for raw in raws])
    benchmark.extra_info["bytes"] = sum(map(len, encoder.encode(raws[-1]))) / streams

    def once() -> float:
        frames = next(received)
        began = time.thread_time()
        raw = decoder.decode(frames)
        processor.process_outputs(raw.outputs, raw.timestamp, None)
        return (time.thread_time() - began) / streams

    measured(once, ROUNDS)


def _raw_outputs(stage: Any) -> Iterator[Any]:
    """Those of enough steps for all rounds, without the steps in which the requests begin."""
    for step in range(ROUNDS + 4):
        scheduled = stage.scheduler.schedule()
        made = stage.scheduler.update_from_output(scheduled, stage.answer(scheduled))
        if step > 1:
            yield from made.values()


def _registered(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from benchmarks.rigs.inprocess import engine_request

    params = SamplingParams(max_tokens=100_000, detokenize=False, output_kind=RequestOutputKind.DELTA)
    return engine_request(name, [1, 2, 3, 4], params)
