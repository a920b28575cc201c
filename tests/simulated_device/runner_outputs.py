"""What a stage's model runner gives its scheduler at every kind of step, in a form that can be compared.

``python -m tests.simulated_device.runner_outputs MODEL_FOLDER FILE`` steps thinker, talker and code2wav by hand, on the
simulated device and then on upstream's own runners, and writes to the file, as JSON: for each device, stage and kind of
step all the different things that were returned.

A process for all of it, because the platform is a process's. It is the same platform for both devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm_omni.distributed.omni_connectors.adapter import compute_talker_prompt_ids_length
from vllm_omni.engine.serialization import serialize_additional_information
from vllm_omni.outputs import OmniModelRunnerOutput

from tests.patches.real_stages import PATIENCE_S, THINKER, Stage, Stream, built

NAMES = ("thinker", "talker", "code2wav")
FIELDS = tuple(field.name for field in dataclasses.fields(OmniModelRunnerOutput))
OF_CONTENT = {"req_ids", "req_id_to_index", "sampled_token_ids", "multimodal_outputs", "inter_stage_outputs"}


def _value(value: Any, tokens: int) -> Any:
    """A payload's value, without what it says: its type and shape, in which the request's tokens are ``n``."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return [str(value.dtype), *("n" if size == tokens else size for size in value.shape)]


def _payload(found: Any, index: int, tokens: int) -> Any:
    """One request's entry in a list of payloads; ``no list`` where there is none."""
    if found is None:
        return "no list"
    payload = found[index]
    if payload is None:
        return None
    # The simulated samples are exact (float32), and the real ones as many as the model's convolutions leave.
    return {key: "samples" if key == "model_outputs" else _value(each, tokens) for key, each in sorted(payload.items())}


def _whole(output: Any) -> dict[str, Any]:
    """What an output is, whatever it says of its requests."""
    found = {
        name: type(getattr(output, name)).__name__
        for name in FIELDS
        if name not in OF_CONTENT and getattr(output, name, None) not in (None, [], {}, False)
    }
    return {
        "class": f"{type(output).__module__}.{type(output).__qualname__}",
        "the empty one": output is EMPTY_MODEL_RUNNER_OUTPUT,
        "missing": [name for name in FIELDS if not hasattr(output, name)],
        "more": sorted(vars(output).keys() - set(FIELDS)),
        "set": found,
    }


def _entry(output: Any, name: str, count: int) -> dict[str, Any]:
    """One request's part of an output."""
    client, sent = (getattr(output, field, None) for field in ("multimodal_outputs", "inter_stage_outputs"))
    index, tokens = output.req_id_to_index[name], output.sampled_token_ids
    return {
        "tokens": [type(each).__name__ for each in tokens[index]] if tokens else "none",
        "to the client": _payload(client, index, count),
        "to the next stage": _payload(sent, index, count),
        "one list": client is sent,
    }


class Recorder:
    """Looks at each step of a stage, between its runner and its scheduler.

    Attributes:
        seen: By kind of step what was returned, as JSON.
    """

    def __init__(self, stage: Stage) -> None:
        self.seen: dict[str, set[str]] = defaultdict(set)
        self.aborted: set[str] = set()
        self._scheduler = stage.scheduler
        self._kinds: dict[int, dict[str, str]] = {}
        self._schedule, self._update = stage.scheduler.schedule, stage.scheduler.update_from_output
        stage.scheduler.schedule, stage.scheduler.update_from_output = self._scheduled, self._updated

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        kinds = {}
        for name, count in output.num_scheduled_tokens.items():
            prompt = self._scheduler.requests[name].num_prompt_tokens
            if name in cached.resumed_req_ids:
                kinds[name] = "resumed"
            elif computed[name] >= prompt:
                kinds[name] = "decode"
            else:
                kinds[name] = "prefill" if computed[name] + count >= prompt else "partial prefill"
        self._kinds[id(output)] = kinds
        return output

    def _updated(self, scheduler_output: Any, output: Any) -> Any:
        kinds = self._kinds.pop(id(scheduler_output))
        counts = scheduler_output.num_scheduled_tokens
        whole, entries = _whole(output), {name: _entry(output, name, counts[name]) for name in counts}
        gone = {name for name in kinds if name not in self._scheduler.requests}
        found = self._update(scheduler_output, output)
        ended = {name for name in kinds if name not in self._scheduler.requests}
        if not kinds:
            self._note("no tokens", whole)
        for name, kind in kinds.items():
            late = "aborted" if name in self.aborted else "after its end"
            self._note(late if name in gone else "last token" if name in ended else kind, {**whole, **entries[name]})
        return found

    def _note(self, kind: str, what: Mapping[str, Any]) -> None:
        self.seen[kind].add(json.dumps(what, sort_keys=True))


class Pipeline:
    """The three stages, stepped one after the other."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages
        self.recorders = [Recorder(stage) for stage in stages]

    def submit(self, stream: Stream, final: int) -> str:
        """Submit a request to all stages up to the final one, as the orchestrator does; its internal id."""
        stream_id, prompt = f"rs-{os.getpid()}-{stream.name}", stream.ids()
        prompts = prompt, *[[0] * compute_talker_prompt_ids_length(prompt)] * 2
        for number, stage in enumerate(self.stages[: final + 1]):
            params = stream.params(number) if number < 2 else SamplingParams(temperature=0.0, max_tokens=65536)
            info = serialize_additional_information({"omni_final_stage_id": final}) if number == 0 else None
            stage.submit(stream_id, prompts[number], params, additional_information=info)
        return f"{stream_id}-internal"

    def until(self, what: Any) -> None:
        """Step each stage that has anything to do until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < deadline, [stage.scheduler.requests for stage in self.stages]
            for stage in self.stages:
                stage.advance()

    def settle(self) -> None:
        """Step until nobody has anything to do."""
        self.until(lambda: not any(stage.scheduler.has_requests() or stage.batch_queue for stage in self.stages))

    def abort(self, request_id: str) -> None:
        """The client leaves."""
        for stage, recorder in zip(self.stages, self.recorders, strict=True):
            recorder.aborted.add(request_id)
            stage.abort_requests([request_id])

    def computed(self, number: int, request_id: str, tokens: int) -> bool:
        """Whether a request has come so far in a stage, beyond its prompt."""
        request = self.stages[number].scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens + tokens)


def record(model: Path) -> dict[str, list[Any]]:
    """Every kind of step, mostly one request at a time; all that was seen, by stage and kind of step."""
    with built(model, len(NAMES), {**THINKER, "dtype": "bfloat16"}, None) as stages:
        pipeline = Pipeline(stages)
        pipeline.submit(Stream("alone", 100), 2)
        pipeline.settle()
        pipeline.submit(Stream("text", 100), 0)
        pipeline.settle()
        for number in range(2):
            leaves = pipeline.submit(Stream(f"leaves{number}", 20), 2)
            pipeline.until(lambda number=number, name=leaves: pipeline.computed(number, name, 3))
            pipeline.abort(leaves)
            pipeline.settle()
        preempted = pipeline.submit(Stream("preempted", 20), 2)
        pipeline.until(lambda: pipeline.computed(0, preempted, 3))
        stages[0].reset_prefix_cache(reset_running_requests=True)
        pipeline.settle()
        pipeline.submit(Stream("both", 20), 2)
        pipeline.submit(Stream("texts", 20), 0)
        pipeline.settle()
    return {
        f"{name}, {kind}": [json.loads(each) for each in sorted(seen)]
        for name, recorder in zip(NAMES, pipeline.recorders, strict=True)
        for kind, seen in sorted(recorder.seen.items())
    }


def main(model: Path, file: Path) -> None:
    """The simulated device, then the real one."""
    found = {}
    for device in ("1", "real"):
        os.environ["OMNI_SIMULATED_DEVICE"] = device  # read when a worker's class is asked for
        found[device] = record(model)
    file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
