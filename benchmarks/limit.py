"""The limit: what the GPUs of a server allow, with no server around them.

The light engines of a server (`omni_simulated_device.light`) make their steps on a clock that jumps, so that a minute
of their time takes a second. A request is with all its stages at once, replicas take turns as upstream's, and what a
stage has made is with the client at once: no front end, no orchestrator. What is left is steps, batches, chunks and the
hop between two stages, all from the classes that a light server runs.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import yaml

from benchmarks.ab.capture import Capture, Piece, Request
from benchmarks.rigs import whole_server
from omni_simulated_device import config
from omni_simulated_device.light import behaviour, wire
from omni_simulated_device.light.behaviour import STOP, StageSpec
from omni_simulated_device.light.engine import Engine, Step
from omni_simulated_device.light.stream import Streams

STAGES: Mapping[str, tuple[str, ...]] = {
    "qwen3_omni": ("thinker", "talker", "code2wav"),
    "qwen3_tts": ("qwen3_tts", "code2wav"),
}
CODEBOOKS = 16
BYTES_A_SAMPLE = 2
_EOS = -1
"""The token that ends a request, which is no content's."""
_TALKER_TOKENS = 6
"""By how much the talker's prompt is longer than the thinker's, of one user's message."""
_SPEECH_TOKENS = 2
"""By how much the prompt of Qwen3-TTS's talker is longer than its text with the roles."""


def limit_of(
    requests: Sequence[Request],
    model: str,
    deploy: str,
    device: Mapping[str, Any],
    *,
    streams: int | None = None,
    starts_s: Sequence[float] | None = None,
) -> list[Capture]:
    """What clients would get from a server that costs nothing, in the order of *requests*.

    Text pieces and audio pieces are as many and as long as a light server's, at their times; their content is not.
    Times are seconds from the beginning.

    Args:
        requests: As a server gets them; chat with text alone in it, or speech.
        model: Which of `omni_simulated_device.models`.
        deploy: Name of a deploy YAML of the simulated device.
        device: What ``OMNI_SIMULATED_DEVICE_CONFIG`` would hold.
        streams: Closed loop: so many are in flight.
        starts_s: Open loop: when each begins.

    Raises:
        ValueError: Neither or both loops are asked for.
    """
    if (streams is None) == (starts_s is None):
        raise ValueError("one of streams and starts_s, not both")
    clock = _Clock()
    server = _Server(model, deploy, config.load(json.dumps(device)), clock)
    asked = [_Asked(Capture(request, 0.0), *_described(model, request)) for request in requests]
    waiting = iter(asked)

    def go_on(now: float) -> None:
        for each in itertools.islice(waiting, 1):
            server.begin(each, now, go_on if starts_s is None else lambda _now: None)

    for start_s in [0.0] * min(streams, len(asked)) if streams is not None else starts_s or ():
        clock.later(start_s, go_on)
    clock.run()
    return [each.capture for each in asked]


class _Clock:
    """Calls functions in the order of their time, without waiting."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()

    def later(self, due: float, task: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (due, next(self._count), task))

    def run(self) -> None:
        while self._due:
            due, _, task = heapq.heappop(self._due)
            task(due)


@dataclass
class _Asked:
    """A request: what comes back, its prompt, what else stage 0 is told, and the stages that have not ended it."""

    capture: Capture
    prompt: list[int]
    information: dict[str, Any]
    stages: set[int]
    ended: Callable[[float], None] = lambda _now: None

    def got(self, stage: int, last: int, answer: behaviour.Answer, now: float) -> None:
        """A stage's answer."""
        body, at_s = self.capture.request.body, now - self.capture.started_at_s
        if answer.tokens and stage == 0 and "text" in body.get("modalities", ()) and answer.finish != STOP:
            self.capture.pieces.append(Piece(at_s, "x"))
        if answer.arrays is not None and stage == last:
            self.capture.pieces.append(Piece(at_s, audio=_silence(answer.arrays["model_outputs"][1].size)))
        if answer.finish is not None:
            self.stages.remove(stage)
            if not self.stages:
                self.capture.status, self.capture.e2e_s = 200, at_s
                self.ended(now)


@functools.cache
def _silence(samples: int) -> bytes:
    return bytes(BYTES_A_SAMPLE * samples)


@dataclass
class _Output:
    """What an engine has made is with the client."""

    asked: Mapping[str, _Asked]
    stage: int
    last: int

    def prepare(self, step: Step) -> None:
        """Nothing has to be encoded."""

    def send(self, step: Step) -> None:
        for part in step.parts:
            self.asked[part.live.request.id].got(self.stage, self.last, part.answer, step.due)

    def idle(self, now: float, live: int) -> None:
        """Nobody is told of requests that wait."""


class _Server:
    """The engines of all stages, and who is asked what."""

    def __init__(self, model: str, deploy: str, device: config.DeviceSettings, clock: _Clock) -> None:
        self._names, self._clock = map(str, itertools.count()), clock
        self._asked: dict[str, _Asked] = {}
        last = len(STAGES[model]) - 1
        given = _deployed(whole_server.deploy(deploy))
        [connector] = given["connectors"].values()
        self._params, self._pools, shared = [], [], Streams()
        for stage, (name, said) in enumerate(zip(STAGES[model], given["stages"], strict=True)):
            spec = _spec(name, said, connector["extra"], device)
            self._params.append({"_eos_token_id": _EOS, **said["default_sampling_params"]})
            slots, budget, out = said["max_num_seqs"], said["max_num_batched_tokens"], _Output(self._asked, stage, last)
            stages = [behaviour.build(spec, lambda: None) for _ in range(said.get("num_replicas", 1))]
            engines = [Engine(stage, each, slots, budget, shared, clock.later, out) for each in stages]
            self._pools.append(itertools.cycle(engines))

    def begin(self, asked: _Asked, now: float, ended: Callable[[float], None]) -> None:
        """A client asks; *ended* is called when all has been answered."""
        asked.capture.started_at_s, asked.ended = now, lambda now: self._clock.later(now, ended)
        name, body = next(self._names), asked.capture.request.body
        self._asked[name] = asked
        for stage in sorted(asked.stages):
            params = {**self._params[stage], **(body if stage == 0 else {})}
            information = {**asked.information, "omni_final_stage_id": max(asked.stages)}
            prompt = asked.prompt if stage == 0 else [0] * (len(asked.prompt) + _TALKER_TOKENS)
            next(self._pools[stage]).add(wire.Request(name, name, 0, prompt, params, information), now)


def _deployed(path: Path) -> dict[str, Any]:
    """A deploy YAML, with what it is based on."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "base_config" not in found:
        return found
    base = _deployed(path.parent / found["base_config"])
    own = {stage["stage_id"]: stage for stage in found.get("stages", ())}
    return {**base, **found, "stages": [{**stage, **own.get(stage["stage_id"], {})} for stage in base["stages"]]}


def _spec(name: str, said: Mapping[str, Any], extra: Mapping[str, Any], device: config.DeviceSettings) -> StageSpec:
    return StageSpec(
        model_stage=name,
        context=said["max_model_len"],
        eos=_EOS,
        codebooks=CODEBOOKS,
        initial_chunk=extra["initial_codec_chunk_frames"],
        chunk=extra["codec_chunk_frames"],
        # Qwen3-TTS's decoder keeps its state, so that no frame is sent twice.
        left_context=0 if extra.get("codec_streaming") else extra["codec_left_context_frames"],
        makes_payload=False,
        gated=False,
        seed=device.seed,
        settings=device.stage(name),
    )


@functools.cache
def _tokenizer(model: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(whole_server.model_folder(model) / "tokenizer.json"))


def _described(model: str, request: Request) -> tuple[list[int], dict[str, Any], set[int]]:
    """A request's prompt, what else stage 0 gets of it, and its stages, as the front end makes them."""
    body = request.body
    if model == "qwen3_tts":
        text = f"<|im_start|>assistant\n{body['input']}<|im_end|>\n<|im_start|>assistant\n"
        told = {"text": body["input"], "task_type": "CustomVoice", "language": "Auto", "speaker": body["voice"]}
        tokens = len(_tokenizer(model).encode(text).ids) + _SPEECH_TOKENS
        return [1] * tokens, {name: [value] for name, value in {**told, "instruct": ""}.items()}, {0, 1}
    [message] = body["messages"]
    text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
    stages = {0, 1, 2} if "audio" in body["modalities"] else {0}
    return _tokenizer(model).encode(text).ids, {}, stages
