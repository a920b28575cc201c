"""What each stage answers, one request and one step at a time.

The counterpart of `stages`, which answers the real schedulers: the same tokens, codes and samples from the same
content. Chunks between the stages are cut as upstream's input processors cut them
(``model_executor/stage_input_processors/qwen3_omni.py`` and ``qwen3_tts.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from omni_simulated_device import content
from omni_simulated_device.config import StageSettings
from omni_simulated_device.light.stream import Chunk, Stream
from omni_simulated_device.light.wire import Request

STOP, LENGTH, ABORT = 0, 1, 2
"""vLLM's ``FinishReason``."""

SAMPLE_RATE = 24000

Arrival = Callable[[Stream], None]
"""Makes what a stage has sent be there in the next one."""

KeptBack = Callable[[], None]
"""Counts an output that leaves without its payload."""

Arrays = dict[str, tuple[str, npt.NDArray[Any]]]
"""Tensors by name, each with torch's name of its type."""


@dataclasses.dataclass(slots=True)
class Live:
    """A request in one stage.

    Attributes:
        request: What was asked.
        stream: What it has in all stages.
        queued_at: When it came.
        computed: Tokens of a prompt that takes several steps that earlier ones have computed.
        outputs: How many outputs it has had here.
        frames: Talkers: what it has said so far.
        sent: Talkers: how many of them code2wav was sent.
        silent: Code2wav: outputs without audio since the last one with.
        ends_at: After how many outputs it ends by itself; None: never, or not known yet.
        next_frame: Talkers: the frame whose first code was the last token.
        aborted: Nothing more may be sent of it.
    """

    request: Request
    stream: Stream
    queued_at: float
    computed: int = 0
    outputs: int = 0
    frames: list[list[int]] = dataclasses.field(default_factory=list)
    sent: int = 0
    silent: int = 0
    ends_at: int | None = None
    next_frame: list[int] | None = None
    aborted: bool = False


@dataclasses.dataclass(slots=True)
class Answer:
    """What one request gets from one step.

    Attributes:
        tokens: New token ids.
        arrays: Its payload, as far as the client gets it.
        finish: Finish reason.
        stop: The token or string that stopped it, where vLLM says it.
        arrival: What the next stage gets.
        prefill: Tokens that the step computed.
    """

    tokens: list[int]
    arrays: Arrays | None = None
    finish: int | None = None
    stop: int | None = None
    arrival: Arrival | None = None
    prefill: int = 0


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """What a stage must know of its deployment; the names are those of upstream's configurations.

    Attributes:
        model_stage: Which behaviour.
        context: Tokens that a request may have.
        eos: The token that ends it.
        codebooks: Codes of a frame.
        initial_chunk: Frames of the first chunk to code2wav; 0: as the others.
        chunk: Frames of a chunk.
        left_context: Frames that code2wav decodes again.
        makes_payload: Whether a talker puts its codes into its outputs, by upstream's rule.
        gated: Whether ``forward_gate`` takes them out again.
        seed: Of everything.
        settings: Of the device, for this stage.
    """

    model_stage: str
    context: int
    eos: int
    codebooks: int
    initial_chunk: int
    chunk: int
    left_context: int
    makes_payload: bool
    gated: bool
    seed: int
    settings: StageSettings


class Behaviour:
    """A stage: who can make a step, what it costs, what comes out.

    Attributes:
        spec: Its deployment.
    """

    samples_tokens: ClassVar[bool] = True

    def __init__(self, spec: StageSpec, kept_back: KeptBack) -> None:
        self.spec = spec
        self._kept_back = kept_back

    def begin(self, live: Live) -> None:
        """A request has come."""

    def ready(self, live: Live) -> bool:  # noqa: ARG002 - some stages' own question
        """Whether there is anything to make a step on; a first stage has its prompt."""
        return True

    def cost_tokens(self, live: Live) -> int:
        """Tokens that the request's next step computes."""
        return 1 if live.outputs else len(live.request.prompt)

    def answer(self, live: Live) -> Answer:
        """Make the step."""
        raise NotImplementedError

    def _fix_content(self, live: Live, kind: str, *what: object) -> bytes:
        """For a first stage and those that see only zeros."""
        request, params = live.request, live.request.params
        final = request.information.get("omni_final_stage_id")
        live.stream.final_stage = None if final is None else int(final)
        seed = content.sampling_seed(params.get("seed"), params.get("temperature", 1.0))
        live.stream.key = content.content_key(self.spec.seed, kind, request.prompt, *what, seed)
        return live.stream.key

    def _stopped(self, live: Live, token: int) -> tuple[int | None, int | None]:
        """Finish and stop reason after *token*, as ``vllm/v1/core/sched/utils.py`` (``check_stop``) has them."""
        params = live.request.params
        if token == params.get("_eos_token_id"):
            return STOP, None
        if token in (params.get("stop_token_ids") or ()):
            return STOP, token
        most = params.get("max_tokens", 16)
        tokens = len(live.request.prompt) + live.outputs
        if tokens >= self.spec.context or (most is not None and live.outputs >= most):
            return LENGTH, None
        return None, None


class Thinker(Behaviour):
    """Qwen3-Omni stage 0: one text token a step; the talker gets a chunk from the second one on."""

    def begin(self, live: Live) -> None:
        """Fix the content and how much of it there will be."""
        key, params = self._fix_content(live, "text"), live.request.params
        room, most = self.spec.context - len(live.request.prompt), params.get("max_tokens", 16)
        limit = room if most is None else min(room, int(most))
        least, goes_on = int(params.get("min_tokens", 0)), bool(params.get("ignore_eos"))
        live.ends_at, live.stream.text_tokens = content.text_length(key, self.spec.settings, least, limit, goes_on)

    def answer(self, live: Live) -> Answer:
        """The next token."""
        stream, index = live.stream, live.outputs
        assert stream.key is not None
        ends = live.ends_at is not None and index + 1 >= live.ends_at
        token = self.spec.eos if ends else content.text_token(stream.key, index)
        live.outputs += 1
        finish, stop = self._stopped(live, token)
        ended = finish is not None
        # The first chunk holds the prompt's rows and one more; it waits for that, or for the end.
        rows = max(live.outputs - 1, int(ended))

        def arrive(stream: Stream) -> None:
            stream.rows, stream.rows_ended = rows, ended

        return Answer([token], None, finish, stop, arrive if rows and stream.final_stage != 0 else None)


class _Talker(Behaviour):
    """One codec frame a step, told in the step after; code2wav gets them in chunks."""

    def answer(self, live: Live) -> Answer:
        """The first code of the next frame; the frame before is complete now."""
        key, index = live.stream.key, live.outputs
        assert key is not None
        if live.next_frame is not None:
            live.frames.append(live.next_frame)
        if not index and not live.request.params.get("ignore_eos"):
            live.ends_at = self._length(live, key)
        ends = live.ends_at is not None and index >= live.ends_at
        live.next_frame = content.codec_frame(key, index, self.spec.codebooks)
        token = self.spec.eos if ends else live.next_frame[0]
        arrays = self._arrays(live) if self.spec.makes_payload else None
        live.outputs += 1
        finish, stop = self._stopped(live, token)
        chunk = self._chunk(live, last=finish is not None)

        def arrive(stream: Stream) -> None:
            assert chunk is not None
            stream.chunks.append(chunk)

        return Answer([token], arrays, finish, stop, None if chunk is None else arrive)

    def _length(self, live: Live, key: bytes) -> int:
        least = int(live.request.params.get("min_tokens", 0))
        return content.speech_frames(key, self.spec.settings, live.stream.text_tokens, least)

    def _arrays(self, live: Live) -> Arrays | None:
        """The codes of the tokens that the step computed, unless they are kept back."""
        if self.spec.gated:
            self._kept_back()
            return None
        if not live.outputs:
            return {"codes.audio": ("int64", np.zeros((len(live.request.prompt), self.spec.codebooks), np.int64))}
        return {"codes.audio": ("int64", np.array([live.frames[-1]], np.int64))}

    def _chunk(self, live: Live, *, last: bool) -> Chunk | None:
        """What code2wav gets after this step, if anything."""
        spec, have = self.spec, len(live.frames)
        size = spec.initial_chunk if spec.initial_chunk and not live.sent else spec.chunk
        if have - live.sent < size and not last:
            return None
        frames = live.frames[live.sent :]
        context = min(live.sent, spec.left_context)
        live.sent = have
        return Chunk(frames, context, last)


class OmniTalker(_Talker):
    """Qwen3-Omni stage 1: a step for each chunk of the thinker, and freely once that has ended."""

    def ready(self, live: Live) -> bool:
        """Whether the chunk for the next step has come."""
        return live.stream.rows > live.outputs or live.stream.rows_ended


class SpeechTalker(_Talker):
    """Qwen3-TTS stage 0: codec frames from the client's text."""

    def begin(self, live: Live) -> None:
        """Fix the content."""
        self._fix_content(live, "speech", [live.request.information.get(name) for name in content.SPEECH_CONTENT])


class Code2Wav(Behaviour):
    """Last stage: a chunk's audio, after as many outputs without audio as the settings say."""

    samples_tokens = False

    def ready(self, live: Live) -> bool:
        """Whether a chunk waits."""
        return bool(live.stream.chunks)

    def cost_tokens(self, live: Live) -> int:
        """Codes of the chunk, those before it included."""
        chunk = live.stream.chunks[0]
        return self.spec.codebooks * (len(chunk.frames) + chunk.context)

    def answer(self, live: Live) -> Answer:
        """The chunk's audio, or an output without any before it."""
        live.outputs += 1
        if live.silent < self.spec.settings.silent:
            live.silent += 1
            return Answer([], self._audio(np.zeros(0, np.float32)))
        live.silent = 0
        chunk = live.stream.chunks.popleft()
        if not chunk.frames:
            return Answer([], None, STOP)
        wave = np.concatenate([content.frame_samples(frame) for frame in chunk.frames])
        return Answer([], self._audio(wave), STOP if chunk.last else None)

    @staticmethod
    def _audio(wave: npt.NDArray[np.float32]) -> Arrays:
        rate = np.array(SAMPLE_RATE, np.int32)
        return {"model_outputs": ("float32", wave.reshape(1, -1)), "sr": ("int32", rate)}


BEHAVIOURS: dict[str, type[Behaviour]] = {
    "thinker": Thinker,
    "talker": OmniTalker,
    "qwen3_tts": SpeechTalker,
    "code2wav": Code2Wav,
}


def build(spec: StageSpec, kept_back: KeptBack) -> Behaviour:
    """The behaviour of a stage."""
    return BEHAVIOURS[spec.model_stage](spec, kept_back)
