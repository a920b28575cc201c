"""Qwen3-Omni's thinker and talker as they are, with a tiny random model on the processor, stepped by hand.

Real are the engine core of each stage, its scheduler, the runner with its persistent batch and KV cache, sampling, the
transfer adapters and shared memory. What `StageEngineCoreProc` adds of sockets and of a process of its own is left out:
the steps are taken here, one stage after the other, so that who is held when is known.

A process for all of it, because the platform, torch's threads and the distributed groups are a process's:
``python -m tests.patches.real_stages MODEL_FOLDER OUT_FILE`` writes what each run gave, as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus
from vllm_omni.config.resolver import resolve_omni_config
from vllm_omni.distributed.omni_connectors.adapter import compute_talker_prompt_ids_length
from vllm_omni.engine.stage_engine_core_proc import StageEngineCoreProc
from vllm_omni.engine.stage_runtime import StageRuntime

import omni_simulated_device
from benchmarks.rigs.engine_requests import engine_request
from omni_fastpath.declare import Process
from tests.patches.drive import only

DEPLOY = Path(omni_simulated_device.__file__).parent / "deploy/qwen3_omni_tiny.yaml"
PATIENCE_S = 60.0
"""A run takes a second or two."""

Hold = Callable[[Any], Sequence[Any]]
"""Given the scheduler that is about to make a step, the running requests that it must leave out."""


@dataclass(frozen=True)
class Stream:
    """A request to the thinker, and through it to the talker.

    Attributes:
        name: Its name in the results.
        prompt: How many tokens the user says.
        arrives: At which round.
        tokens: How many the thinker samples.
        temperature: Of the thinker; with one above zero it is seeded.
    """

    name: str
    prompt: int
    arrives: int = 0
    tokens: int = 28
    temperature: float = 0.0

    def ids(self) -> list[int]:
        """The prompt: one user's turn of its own random words."""
        words = random.Random(self.name).choices(range(1000, 70_000), k=self.prompt)
        return [151644, 872, 198, *words, 151645, 198, 151644, 77091, 198]

    def thinker_params(self) -> SamplingParams:
        """Greedy unless it has a temperature; it does not end by itself."""
        return SamplingParams(
            temperature=self.temperature,
            seed=7 if self.temperature else None,
            max_tokens=self.tokens,
            ignore_eos=True,
            detokenize=False,
        )

    def talker_params(self) -> SamplingParams:
        """As in the deploy YAML, but it does not end by itself."""
        return SamplingParams(
            temperature=0.9,
            top_k=50,
            seed=42,
            repetition_penalty=1.05,
            max_tokens=self.tokens + 10,
            ignore_eos=True,
            detokenize=False,
        )


@dataclass
class Run:
    """What a run gave, and what was done to it.

    Attributes:
        tokens: Of each stage, by stream.
        sent: What the last stage sent to the next one: for each stream one line a value, chunk by chunk.
        left_out: By stage and stream: steps that a running request was left out of.
        left_out_of_prompt: The same, those between two pieces of its prompt.
        preempted: By stage: preemptions.
        counters: Of `save_queue_cap`, where it is installed.
    """

    tokens: list[dict[str, list[int]]] = field(default_factory=list)
    sent: dict[str, list[Any]] = field(default_factory=dict)
    left_out: list[dict[str, int]] = field(default_factory=list)
    left_out_of_prompt: list[dict[str, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


class Stage(StageEngineCoreProc):  # type: ignore[misc]
    """Upstream's engine core of one stage, to be stepped by whoever made it."""

    def __init__(self, vllm_config: Any, executor_class: type) -> None:
        # Past EngineCoreProc's constructor, which opens sockets and starts threads that wait for a front end.
        EngineCore.__init__(self, vllm_config, executor_class, log_stats=False)
        self.turns = 0
        self.begin(None)
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._scheduled

    def begin(self, hold: Hold | None) -> None:
        """A new run, with those held that *hold* says."""
        self.hold: Hold = hold or (lambda _scheduler: ())
        self.left_out: Counter[str] = Counter()
        self.left_out_of_prompt: Counter[str] = Counter()
        self.preempted = 0

    @property
    def runner(self) -> Any:
        """The model runner of the stage's only worker."""
        return self.model_executor.driver_worker.worker.model_runner

    def shutdown(self) -> None:
        """Stop the adapter's threads, and unlink what nobody fetched."""
        self.scheduler.chunk_transfer_adapter.shutdown()
        EngineCore.shutdown(self)

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step without those that are to be held, and see that it is so."""
        scheduler = self.scheduler
        held = list(self.hold(scheduler))
        for request in held:
            # schedule() counts its step first and leaves out whoever is eligible only later than that.
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, scheduler.current_step + 2)
        running = list(scheduler.running)
        output = self._schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        assert not [request.request_id for request in held if request.request_id in scheduled]
        for request in running:
            if request.request_id not in scheduled and request.status == RequestStatus.RUNNING:
                self.left_out[request.external_req_id] += 1
                if request.num_computed_tokens < request.num_prompt_tokens:
                    self.left_out_of_prompt[request.external_req_id] += 1
        self.preempted += len(output.preempted_req_ids or ())
        return output

    def submit(self, stream_id: str, prompt: list[int], params: SamplingParams) -> None:
        """A request, as it comes from the orchestrator."""
        request = engine_request(stream_id, prompt, params, request_id=f"{stream_id}-internal")
        self.add_request(*self.preprocess_add_request(request))

    def take_step(self) -> Iterator[tuple[str, list[int]]]:
        """One step, if there is anything to do; stream and new tokens of whatever came out."""
        self.turns += 1
        if not (self.scheduler.has_requests() or self.batch_queue):
            return
        outputs, executed = self.step_fn()
        self.post_step(executed)
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                assert output.finish_reason is None or str(output.finish_reason) == "length", output
                yield output.request_id.removesuffix("-internal"), list(output.new_token_ids)


def build(model: Path, *, stages: int = 1, **overrides: Any) -> list[Stage]:
    """The first stages of the deployment.

    Args:
        model: A folder that `omni_simulated_device.models` wrote.
        stages: How many.
        overrides: Engine arguments of all of them.
    """
    resolution = resolve_omni_config(
        str(model),
        trust_remote_code=None,
        deploy_config_path=str(DEPLOY),
        cli_overrides={},
        stage_overrides={str(stage): overrides for stage in range(stages)},
        strategy_config_path=None,
    )
    runtime = StageRuntime(
        list(resolution.stage_configs), str(model), resolution.config_path, stage_init_timeout=60, async_chunk=True
    )
    plans = [plan.replicas[0] for plan in runtime._prepare_stage_plans()]
    return [Stage(plan.stage_vllm_config, plan.executor_class) for plan in plans[:stages]]


class _Receiver:
    """Fetches what the last stage sends, as the next stage would."""

    def __init__(self, stage: Stage) -> None:
        self._connector = stage.scheduler.chunk_transfer_adapter.connector
        self._chunks: Counter[str] = Counter()
        self.sent: dict[str, list[Any]] = {}
        self.ended: set[str] = set()

    def fetch(self, stream_id: str) -> None:
        """Everything of that stream that is there."""
        stage = self._connector.stage_id
        while stream_id not in self.ended:
            found = self._connector.get(str(stage), str(stage + 1), f"{stream_id}_{stage}_{self._chunks[stream_id]}")
            if found is None:
                return
            self.sent.setdefault(stream_id, []).extend(
                [self._chunks[stream_id], *line] for line in _lines("", found[0])
            )
            self._chunks[stream_id] += 1
            if bool(found[0]["meta"]["finished"]):
                self.ended.add(stream_id)


def _lines(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a payload; floating-point numbers rounded to what batches of other sizes leave alone."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _lines(f"{path}.{key}", value[key])
    elif isinstance(value, torch.Tensor):
        yield f"{path} {tuple(value.shape)} {value.dtype}", value.double().flatten().tolist()
    elif value is not None:
        yield path, value


def serve(stages: Sequence[Stage], streams: Sequence[Stream], holds: Sequence[Hold | None] = ()) -> Run:
    """Serve the streams to their end.

    Args:
        stages: The thinker, or the thinker and the talker.
        streams: Who comes when.
        holds: For each stage who is held; None: nobody.
    """
    run_id = uuid.uuid4().hex[:12]  # segments in shared memory are everybody's
    ids = {f"{stream.name}-{run_id}": stream for stream in streams}
    run = Run(tokens=[{stream.name: [] for stream in streams} for _ in stages])
    for stage, hold in itertools.zip_longest(stages, holds):
        stage.begin(hold)
    receiver = _Receiver(stages[-1])
    began = time.monotonic()
    turn = 0
    while not (receiver.ended >= set(ids) and not any(stage.scheduler.has_requests() for stage in stages)):
        assert time.monotonic() - began < PATIENCE_S, (run.tokens, receiver.ended)
        for stream_id, stream in ids.items():
            if stream.arrives == turn:
                stages[0].submit(stream_id, stream.ids(), stream.thinker_params())
                for stage in stages[1:]:
                    length = compute_talker_prompt_ids_length(stream.ids())
                    stage.submit(stream_id, [0] * length, stream.talker_params())
        for number, stage in enumerate(stages):
            for stream_id, tokens in stage.take_step():
                run.tokens[number][ids[stream_id].name] += tokens
        for stream_id in ids:
            receiver.fetch(stream_id)
        turn += 1
    run.sent = {ids[stream_id].name: lines for stream_id, lines in receiver.sent.items()}
    run.left_out = [{ids[each].name: n for each, n in stage.left_out.items()} for stage in stages]
    run.left_out_of_prompt = [{ids[each].name: n for each, n in stage.left_out_of_prompt.items()} for stage in stages]
    run.preempted = [stage.preempted for stage in stages]
    return run


class RandomHolds:
    """Each stream is left out for some steps again and again, now and then all of them; a prompt's chunks too.

    Args:
        seed: Of who is held when.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left: dict[str, int] = {}

    def __call__(self, scheduler: Any) -> list[Any]:
        """Who is left out of the next step."""
        everybody = self._random.random() < 0.03
        held = []
        for request in scheduler.running:
            left = self._left.get(request.request_id, 0)
            share = 0.5 if request.num_computed_tokens < request.num_prompt_tokens else 0.15
            if not left and (everybody or self._random.random() < share):
                left = self._random.randint(1, 5)
            if left:
                self._left[request.request_id] = left - 1
                held.append(request)
        return held


@contextlib.contextmanager
def scarce(stage: Stage, left: int) -> Iterator[None]:
    """Leave only that many blocks of KV cache, so that running requests are preempted."""
    pool = stage.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - left)
    try:
        yield
    finally:
        pool.free_blocks(taken)


@contextlib.contextmanager
def slow_sends(stage: Stage, name: str, turns: int) -> Iterator[None]:
    """Let each send of one stream last as long as so many steps of the stage."""
    connector = stage.scheduler.chunk_transfer_adapter.connector
    put = connector.put

    def slow_put(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        until, deadline = stage.turns + turns, time.monotonic() + PATIENCE_S
        while put_key.startswith(f"{name}-") and stage.turns < until and time.monotonic() < deadline:
            time.sleep(0.0005)
        return put(from_stage, to_stage, put_key, data)

    connector.put = slow_put
    try:
        yield
    finally:
        del connector.put


def differences(run: Run, expected: Run, *, sent: bool = True) -> list[str]:
    """What a run gave that the other one did not, in words; one line a stream and stage."""
    found = []
    for stage, streams in enumerate(expected.tokens):
        for name, tokens in streams.items():
            if (got := run.tokens[stage][name]) != tokens:
                first = next(
                    (n for n, pair in enumerate(zip(got, tokens, strict=False)) if pair[0] != pair[1]), len(got)
                )
                found.append(f"stage {stage}, {name}: token {first} of {len(got)} differs ({len(tokens)} expected)")
    for name, lines in expected.sent.items() if sent else ():
        got_lines = run.sent.get(name, [])
        if len(got_lines) != len(lines):
            found.append(f"{name}: {len(got_lines)} values sent instead of {len(lines)}")
        for got_line, line in zip(got_lines, lines, strict=False):
            if not _alike(got_line, line):
                found.append(f"{name}: sent in chunk {line[0]}, {line[1]} differs")
                break
    return found


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4)
    return bool(one == other)


THINKER = {"dtype": "float32", "max_num_batched_tokens": 64, "block_size": 32, "async_scheduling": True}
"""In bfloat16 a batch of another size rounds otherwise, and two near logits may change places."""
THINKER_STREAMS = (
    Stream("seeded", 20, temperature=0.2),  # first, so that its prompt is not cut: no CPU generator takes a draw back
    Stream("first", 25),
    Stream("long", 150, arrives=4),
    Stream("longer", 190, arrives=9),
    Stream("last", 10, arrives=14),
)
"""With 64 tokens a step the long prompts are computed in pieces, while others are held."""
FEW_BLOCKS = 18
"""Of KV cache, 32 tokens each: enough for all prompts, too few for what follows."""
PIPELINE_STREAMS = (Stream("one", 12, tokens=20), Stream("two", 30, tokens=24), Stream("three", 20, 6, tokens=16))


@contextlib.contextmanager
def _built(model: Path, **overrides: Any) -> Iterator[list[Stage]]:
    stages = build(model, **overrides)
    try:
        yield stages
    finally:
        for stage in stages:
            stage.shutdown()


def thinker_runs(model: Path) -> dict[str, dict[str, Any]]:
    """The thinker: no stream held, held at random, held and preempted; each beside the first."""
    with _built(model, **THINKER) as stages:
        (thinker,) = stages
        assert thinker.batch_queue is not None, "no async scheduling"
        free = serve(stages, THINKER_STREAMS)
        results = {"free": _result(free, free)}
        results["held"] = _result(serve(stages, THINKER_STREAMS, [RandomHolds(0)]), free)
        with scarce(thinker, FEW_BLOCKS):
            # Upstream does not send the row of the step that computes a preempted stream again, held or not.
            results["preempted"] = _result(serve(stages, THINKER_STREAMS, [RandomHolds(5)]), free, sent=False)
    return results


def pipeline_runs(model: Path) -> tuple[Run, dict[str, dict[str, Any]]]:
    """Thinker and talker: the run in which no stream is held, and beside it one in which both stages' are."""
    from vllm_omni.model_executor.models.common.qwen3_code_predictor import CodePredictorWrapper

    # Upstream draws the residual codes of everybody in a batch from one generator, so that no two runs agree.
    CodePredictorWrapper._sample_codes_gumbel = staticmethod(
        lambda logits, generator=None, uniforms=None: logits.argmax(dim=-1, keepdim=True)
    )
    with _built(model, stages=2) as stages:
        free = serve(stages, PIPELINE_STREAMS)
        results = {"free": _result(free, free)}
        held = serve(stages, PIPELINE_STREAMS, [RandomHolds(3), RandomHolds(4)])
        results["held"] = _result(held, free)
    return free, results


def patched_run(model: Path, free: Run) -> dict[str, Any]:
    """With the patch, one stream of each stage slow, against the run of the same stages without it."""
    patched = only("save_queue_cap", process=Process.STAGE, max_tasks=3)
    with patched as entry, _built(model, stages=2) as stages, contextlib.ExitStack() as context:
        # The talker has something to send once in 25 of its save tasks.
        for stage, name, turns in zip(stages, ("two", "one"), (6, 30), strict=True):
            context.enter_context(slow_sends(stage, name, turns))
        run = serve(stages, PIPELINE_STREAMS)
    run.counters = dict(entry.counters)
    return _result(run, free)


def _result(run: Run, expected: Run, *, sent: bool = True) -> dict[str, Any]:
    """A run for the outside. The values sent are compared here, because they are many."""
    shown = {key: value for key, value in asdict(run).items() if key != "sent"}
    values = {name: len(lines) for name, lines in run.sent.items()}
    return {**shown, "values": values, "differences": differences(run, expected, sent=sent)}


def main(model: Path, out: Path) -> None:
    """Everything, into one file."""
    thinker = thinker_runs(model)
    free, pipeline = pipeline_runs(model)
    pipeline["patched"] = patched_run(model, free)
    out.write_text(json.dumps({"thinker": thinker, "pipeline": pipeline}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
