"""Qwen3-Omni's thinker and talker as they are, with a tiny random model on the processor, stepped by hand.

Real are the engine core of each stage, its scheduler, the runner with its persistent batch and KV cache, sampling, the
transfer adapters and shared memory. What `StageEngineCoreProc` adds of sockets and of a process of its own is left out:
the steps are taken here, one stage after the other, so that it is known which stream is held when.

A process for all of it, because the platform, torch's threads and the distributed groups are a process's:
``python -m tests.patches.real_stages MODEL_FOLDER`` fails if a held stream gets another result.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus
from vllm_omni.config.resolver import resolve_omni_config
from vllm_omni.distributed.omni_connectors.adapter import compute_talker_prompt_ids_length
from vllm_omni.engine.stage_engine_core_proc import StageEngineCoreProc
from vllm_omni.engine.stage_runtime import StageRuntime
from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorWrapper

import omni_simulated_device
from benchmarks.rigs.inprocess import engine_request
from omni_fastpath.declare import Process
from tests.patches.drive import only

DEPLOY = Path(omni_simulated_device.__file__).parent / "deploy/qwen3_omni_tiny.yaml"
PATIENCE_S = 60.0
"""A run takes a second or two, on a busy machine ten."""

THINKER = {"dtype": "float32", "max_num_batched_tokens": 64, "block_size": 32, "async_scheduling": True}
"""In bfloat16 a batch of another size rounds otherwise, and two near logits may change places."""


def _name(request_id: str) -> str:
    """The stream's name in an id of `serve`."""
    return request_id.removesuffix("-internal").rpartition("-")[2]


@dataclass(frozen=True)
class Stream:
    """A request to the thinker, and through it to the talker.

    Attributes:
        name: Its name in the results.
        prompt: How many tokens the user says.
        arrives: At which round.
        temperature: Of the thinker; with one above zero it is seeded.
    """

    name: str
    prompt: int
    arrives: int = 0
    temperature: float = 0.0

    def ids(self) -> list[int]:
        """The prompt: one user's turn of its own random words."""
        words = random.Random(self.name).choices(range(1000, 70_000), k=self.prompt)
        return [151644, 872, 198, *words, 151645, 198, 151644, 77091, 198]

    def params(self, stage: int) -> SamplingParams:
        """The thinker's, greedy unless it has a temperature, or the talker's, as in the deploy YAML; none ends it."""
        of_talker = {"temperature": 0.9, "top_k": 50, "seed": 42, "repetition_penalty": 1.05, "max_tokens": 38}
        of_thinker = {"temperature": self.temperature, "seed": 7 if self.temperature else None, "max_tokens": 28}
        return SamplingParams(ignore_eos=True, detokenize=False, **(of_talker if stage else of_thinker))


PIPELINE_STREAMS = (Stream("one", 12), Stream("two", 30), Stream("three", 20, arrives=6))
THINKER_STREAMS = (
    Stream("seeded", 20, temperature=0.2),  # first, so that its prompt is not cut: no CPU generator takes a draw back
    Stream("first", 25),
    Stream("long", 150, arrives=4),
    Stream("longer", 190, arrives=9),
    Stream("last", 10, arrives=14),
)
"""With 64 tokens a step the thinker computes the long prompts in pieces, while others are held."""


class Stage(StageEngineCoreProc):  # type: ignore[misc]
    """Upstream's engine core of one stage, which its owner steps.

    Attributes:
        left_out: By stream: steps that a running request was left out of.
    """

    def __init__(self, vllm_config: Any, executor_class: type, holds: random.Random | None) -> None:
        # Past EngineCoreProc's constructor, which opens sockets and starts threads that wait for a front end.
        EngineCore.__init__(self, vllm_config, executor_class, log_stats=False)
        self.turns = 0
        self.left_out: Counter[str] = Counter()
        self._holds = holds
        self._still_held: Counter[str] = Counter()
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._scheduled

    def shutdown(self) -> None:
        """Stop the adapter's threads, and unlink what nobody fetched."""
        self.scheduler.chunk_transfer_adapter.shutdown()
        EngineCore.shutdown(self)

    def _held(self, rng: random.Random) -> Iterator[Any]:
        """Each stream for some steps again and again, now and then all of them; between a prompt's pieces too."""
        everybody = rng.random() < 0.03
        for request in self.scheduler.running:
            share = 0.5 if request.num_computed_tokens < request.num_prompt_tokens else 0.15
            if not self._still_held[request.request_id] and (everybody or rng.random() < share):
                self._still_held[request.request_id] = rng.randint(1, 5)
            if self._still_held[request.request_id]:
                self._still_held[request.request_id] -= 1
                yield request

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step without those that are to be held, and see that it is so."""
        scheduler = self.scheduler
        held = list(self._held(self._holds)) if self._holds else []
        for request in held:
            # schedule() counts its step first and leaves out a request that is eligible only later than that.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + 2)
        running = list(scheduler.running)
        output = self._schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        assert not [request.request_id for request in held if request.request_id in scheduled]
        for request in running:
            if request.request_id not in scheduled and request.status == RequestStatus.RUNNING:
                self.left_out[_name(request.external_req_id)] += 1
        return output

    def submit(self, stream_id: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        """A request, as it comes from the orchestrator."""
        request = engine_request(stream_id, prompt, params, request_id=f"{stream_id}-internal", **fields)
        self.add_request(*self.preprocess_add_request(request))

    def advance(self) -> list[Any]:
        """One step, if there is anything to do; the outputs."""
        self.turns += 1
        if not (self.scheduler.has_requests() or self.batch_queue):
            return []
        outputs, executed = self.step_fn()
        self.post_step(executed)
        return [output for batch in (outputs or {}).values() for output in batch.outputs]


@contextlib.contextmanager
def built(model: Path, count: int, overrides: Mapping[str, Any], seed: int | None) -> Iterator[list[Stage]]:
    """The first stages of the deployment.

    Args:
        model: A folder that `omni_simulated_device.models` wrote.
        count: How many stages.
        overrides: Engine arguments of the thinker.
        seed: Of the random holds; None for none.
    """
    resolution = resolve_omni_config(
        str(model),
        trust_remote_code=None,
        deploy_config_path=str(DEPLOY),
        cli_overrides={},
        stage_overrides={"0": dict(overrides)},
        strategy_config_path=None,
    )
    runtime = StageRuntime(
        list(resolution.stage_configs), str(model), resolution.config_path, stage_init_timeout=60, async_chunk=True
    )
    holds = [None if seed is None else random.Random(seed + stage) for stage in range(count)]
    plans = [plan.replicas[0] for plan in runtime._prepare_stage_plans()]
    stages = [Stage(plan.stage_vllm_config, plan.executor_class, rng) for plan, rng in zip(plans, holds, strict=False)]
    try:
        yield stages
    finally:
        for stage in stages:
            stage.shutdown()


def serve(stages: Sequence[Stage], streams: Sequence[Stream]) -> list[dict[str, list[int]]]:
    """Serve the streams to their end: the tokens of each stage by stream."""
    # Shared memory is everybody's, and `benchmarks.rigs.server` removes what it takes for a server's.
    ids = {stream.name: f"rs-{os.getpid()}-{stream.name}" for stream in streams}
    tokens: list[dict[str, list[int]]] = [{name: [] for name in ids} for _ in stages]
    deadline, waiting = time.monotonic() + PATIENCE_S, list(streams)
    while waiting or any(stage.scheduler.has_requests() for stage in stages):
        assert time.monotonic() < deadline, tokens
        while waiting and waiting[0].arrives <= stages[0].turns:
            stream = waiting.pop(0)
            prompts = stream.ids(), [0] * compute_talker_prompt_ids_length(stream.ids())
            for number, stage in enumerate(stages):
                stage.submit(ids[stream.name], prompts[number], stream.params(number))
        for stage, found in zip(stages, tokens, strict=True):
            for output in stage.advance():
                assert output.finish_reason is None or str(output.finish_reason) == "length", output
                found[_name(output.request_id)] += output.new_token_ids
    for stage in stages:
        stage.turns += 1000  # no send is slow any more
    return tokens


def slow_sends(stage: Stage, name: str, turns: int) -> None:
    """Let each send of one stream last as long as so many steps of the stage."""
    connector = stage.scheduler.chunk_transfer_adapter.connector
    put = connector.put

    def slow_put(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        until, deadline = stage.turns + turns, time.monotonic() + PATIENCE_S
        while f"-{name}_" in put_key and stage.turns < until and time.monotonic() < deadline:
            time.sleep(0.0005)
        return put(from_stage, to_stage, put_key, data)

    connector.put = slow_put


def compare(model: Path, streams: Sequence[Stream], slow: Mapping[str, int], **overrides: Any) -> None:
    """Serve without the patch, then with it and random holds, and compare the tokens.

    Args:
        model: As for `built`.
        streams: The requests, with their rounds of arrival.
        slow: For each stage a stream, and how many steps each of its sends lasts.
        overrides: As for `built`.
    """
    with built(model, len(slow), overrides, None) as stages:
        assert stages[0].batch_queue is not None, "no async scheduling"
        tokens = serve(stages, streams)
        # With async scheduling each stream waits one step for its last token.
        assert all(count <= 1 for stage in stages for count in stage.left_out.values())
    assert all(len(set(each)) > len(each) / 2 for stage in tokens for each in stage.values()), tokens

    patched = only("save_queue_cap", process=Process.STAGE, max_tasks=3)
    with patched as entry, built(model, len(slow), overrides, seed=3) as stages:
        for stage, (name, turns) in zip(stages, slow.items(), strict=True):
            slow_sends(stage, name, turns)
        found = serve(stages, streams)
        assert entry.counters["holds"] >= 5, (entry.counters, entry.reason, entry.state, entry.options)
        assert entry.counters["expired_holds"] == 0
    for stage in stages:
        assert all(stage.left_out[stream.name] >= 3 for stream in streams), stage.left_out
    assert found == tokens


def main(model: Path) -> None:
    """The thinker alone, and thinker and talker."""
    compare(model, THINKER_STREAMS, {"first": 6}, **THINKER)
    # Upstream draws the residual codes of everybody in a batch from one generator, so that no two runs agree.
    CodePredictorWrapper._sample_codes_gumbel = staticmethod(
        lambda logits, generator=None, uniforms=None: logits.argmax(dim=-1, keepdim=True)
    )
    # The talker has something to send once in 25 of its save tasks.
    compare(model, PIPELINE_STREAMS, {"two": 6, "one": 30})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
