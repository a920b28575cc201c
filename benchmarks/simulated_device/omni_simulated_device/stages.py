"""What each model stage answers in one step: tokens for each request, and tensors for the batch.

A stage keeps nothing of its own between steps. What a request has so far is in `RequestState`; which output comes next
follows from the scheduler's position, so that a preempted and repeated request gives the same answer again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger
from vllm_omni.engine.serialization import deserialize_additional_information

from omni_simulated_device import content
from omni_simulated_device.config import DeviceSettings, StageSettings

logger = init_logger("vllm.omni_simulated_device")

Outputs = dict[str, torch.Tensor | list[torch.Tensor]]
"""What a model puts out beside tokens in one step, flat: of a batched tensor each request has its rows, of a list its
entry; a list of one is everybody's."""


@dataclasses.dataclass
class RequestState:
    """One request as its stage knows it."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: Any
    info: Mapping[str, Any]
    """Payload that the scheduler attached to this step: the upstream stage's chunk, or the client's fields."""
    computed: int = 0
    """Tokens whose step was scheduled before this one."""
    goes_on: bool = True
    """Whether a later stage works on it; else nobody gets its payload."""
    key: bytes | None = None
    text_tokens: int = 0
    """Planned length of the request's text, for a talker."""
    next_position: int | None = None
    """Talker: position that the next upstream row must hold."""
    damaged: bool = False
    """Talker: an upstream row was missing, repeated or out of order."""


@dataclasses.dataclass
class StepResult:
    """What one request gets from one step."""

    tokens: list[int]
    rows: npt.NDArray[Any]
    """What the stage's ``outputs`` makes this request's part of: a row for each token computed, or samples."""


class Thinker:
    """Qwen3-Omni stage 0: text, and per token one hidden-state row of two layers for the talker.

    The last layer's rows are put out too, as upstream's runner does for this stage
    (``omni_pooler_payload_include_hidden`` is unset), although its input processor does not send them.
    """

    def __init__(self, vllm_config: Any, settings: DeviceSettings) -> None:
        hf_config = vllm_config.model_config.hf_config
        self._seed = settings.seed
        self._settings = settings.stage("thinker")
        self._eos = int(hf_config.im_end_token_id)
        self._context = int(vllm_config.model_config.max_model_len)
        layer = int(hf_config.talker_config.accept_hidden_layer)
        width = int(hf_config.thinker_config.text_config.hidden_size)
        self._layers = ("hidden_states.layer_0", f"hidden_states.layer_{layer}", "hidden")
        self._width = width
        self._mark = torch.zeros(1, 1, width, dtype=torch.bfloat16)

    def _plan(self, request: RequestState) -> tuple[bytes, int | None, int]:
        """The request's key, after how many tokens it ends by itself (None: never), and how many it will have."""
        params = request.sampling_params
        if request.key is None:
            seed = content.sampling_seed(params.seed, params.temperature)
            request.key = content.content_key(self._seed, "text", request.prompt_token_ids, seed)
        room = self._context - len(request.prompt_token_ids)
        limit = min(room, params.max_tokens) if params.max_tokens is not None else room
        settings, least = self._settings, params.min_tokens
        return request.key, *content.text_length(request.key, settings, least, limit, params.ignore_eos)

    def step(self, request: RequestState, scheduled: int) -> StepResult:
        """Publish the rows of the tokens computed here and, once the prompt is complete, sample one token."""
        key, length, planned = self._plan(request)
        tags = content.encode_tags(key, range(request.computed, request.computed + scheduled), planned)
        index = request.computed + scheduled - len(request.prompt_token_ids)
        if index < 0:
            return StepResult([], tags)
        ends = length is not None and index + 1 >= length
        return StepResult([self._eos if ends else content.text_token(key, index)], tags)

    def outputs(self, results: Sequence[StepResult]) -> Outputs:
        """Each layer's rows, [tokens, width] bfloat16, and the three marks of speech, one for everybody."""
        tags = torch.from_numpy(np.concatenate([each.rows for each in results]))
        rows = torch.full((len(tags), self._width), 0.5, dtype=torch.bfloat16)
        rows[:, : content.ROW_BYTES] = tags
        first, *others = self._layers
        marks: Outputs = {f"embed.tts_{name}": [self._mark] for name in ("bos", "eos", "pad")}
        return {first: rows, **{layer: rows.clone() for layer in others}, **marks}


class _Talker:
    """A stage that makes one codec frame per step until the request's planned number of frames."""

    def __init__(self, vllm_config: Any, settings: DeviceSettings) -> None:
        hf_config = vllm_config.model_config.hf_config
        talker = getattr(hf_config, "talker_config", hf_config)
        self._seed = settings.seed
        self._settings: StageSettings = settings.stage(vllm_config.model_config.model_stage)
        self._eos = int(talker.codec_eos_token_id)
        self._codebooks = int(talker.num_code_groups)

    def _key(self, request: RequestState) -> bytes:
        raise NotImplementedError

    def step(self, request: RequestState, scheduled: int) -> StepResult:
        """Sample the first code of the next frame and, like the real talkers, publish the frame sampled before it."""
        key = self._key(request)
        index = request.computed + scheduled - len(request.prompt_token_ids)
        if index <= 0:
            frame = np.zeros((scheduled, self._codebooks), dtype=np.int64)
        else:
            frame = np.array([self._frame(request, key, index - 1)], dtype=np.int64)
        if index < 0:
            return StepResult([], frame)
        params = request.sampling_params
        frames = content.speech_frames(key, self._settings, request.text_tokens, params.min_tokens)
        ends = index >= frames and not params.ignore_eos
        return StepResult([self._eos if ends else self._frame(request, key, index)[0]], frame)

    def outputs(self, results: Sequence[StepResult]) -> Outputs:
        """Each token's codes, [tokens, codebooks] int64; zeros where there is no frame."""
        return {"codes.audio": torch.from_numpy(np.concatenate([each.rows for each in results]))}

    def _frame(self, request: RequestState, key: bytes, index: int) -> list[int]:
        codes = content.codec_frame(key, index, self._codebooks)
        if request.damaged:  # what was lost on the way must be heard at the end
            codes[-1] = codes[-1] % (content.CODEBOOK_SIZE - 1) + 1
        return codes


class SpeechTalker(_Talker):
    """Qwen3-TTS stage 0: codec frames from the client's text."""

    def _key(self, request: RequestState) -> bytes:
        if request.key is None:
            fields = deserialize_additional_information(request.info)
            spoken = [fields.get(name) for name in content.SPEECH_CONTENT]
            params = request.sampling_params
            seed = content.sampling_seed(params.seed, params.temperature)
            request.key = content.content_key(self._seed, "speech", request.prompt_token_ids, spoken, seed)
        return request.key

    def outputs(self, results: Sequence[StepResult]) -> Outputs:
        """The codes, and for each token whether there is a frame."""
        codes = super().outputs(results)["codes.audio"]
        assert isinstance(codes, torch.Tensor)
        return {"codes.audio": codes, "meta.codec_frame_valid": codes[:, 0] != 0}


class OmniTalker(_Talker):
    """Qwen3-Omni stage 1: codec frames from the thinker's rows, which it also checks for order and completeness."""

    def _key(self, request: RequestState) -> bytes:
        embed = request.info.get("embed")
        embed = embed if isinstance(embed, Mapping) else {}
        if request.key is None:
            first = embed.get("prefill")
            if not isinstance(first, torch.Tensor) or not len(first):
                raise RuntimeError(f"talker request {request.req_id} was scheduled without its thinker's rows")
            tags = [content.decode_tag(row) for row in first[[0, -1], : content.ROW_BYTES].tolist()]
            request.key, request.text_tokens = tags[0].key, tags[0].text_tokens
            request.next_position = tags[-1].position + 1
            if len(first) != tags[-1].position + 1:
                self._damage(request, f"{len(first)} prompt rows end at position {tags[-1].position}")
        elif isinstance(row := embed.get("decode"), torch.Tensor):
            tag = content.decode_tag(row[-1, : content.ROW_BYTES].tolist())
            if (tag.key, tag.position) != (request.key, request.next_position):
                self._damage(request, f"row of position {tag.position} where {request.next_position} was due")
            request.next_position = tag.position + 1
        return request.key

    @staticmethod
    def _damage(request: RequestState, what: str) -> None:
        if not request.damaged:
            logger.error("[simulated device] thinker rows of %s are damaged: %s", request.req_id, what)
        request.damaged = True


class Code2Wav:
    """Last stage: audio of the codec frames in this chunk, left context excluded."""

    def __init__(self, vllm_config: Any, settings: DeviceSettings) -> None:  # noqa: ARG002 - the stages' own signature
        hf_config = vllm_config.model_config.hf_config
        talker = getattr(hf_config, "talker_config", hf_config)
        self._codebooks = int(getattr(talker, "num_code_groups", 16))
        self._rate = torch.tensor(24000, dtype=torch.int32)

    def step(self, request: RequestState, scheduled: int) -> StepResult:
        """Turn the chunk, which arrives as the request's prompt (codebook after codebook), into samples."""
        if scheduled < len(request.prompt_token_ids):
            raise RuntimeError(
                f"code2wav was given {scheduled} of a chunk's {len(request.prompt_token_ids)} codes; "
                "raise max_num_batched_tokens in the deploy file"
            )
        codes = np.asarray(request.prompt_token_ids, dtype=np.int64)
        frames = len(codes) // self._codebooks
        meta = request.info.get("meta")
        skip = int(meta.get("left_context_size") or 0) if isinstance(meta, Mapping) else 0
        columns = codes[: frames * self._codebooks].reshape(self._codebooks, frames).T[skip:].tolist()
        waves = [content.frame_samples(column) for column in columns]
        return StepResult([], np.concatenate(waves) if waves else np.zeros(0, dtype=np.float32))

    def outputs(self, results: Sequence[StepResult]) -> Outputs:
        """Each request's audio, [1, samples] float32, and its sample rate."""
        waves = [torch.from_numpy(each.rows).reshape(1, -1) for each in results]
        return {"model_outputs": waves, "sr": [self._rate.clone() for _ in results]}


Stage = Thinker | OmniTalker | SpeechTalker | Code2Wav
"""A model stage's behaviour."""

STAGES: Mapping[str, type[Stage]] = {
    "thinker": Thinker,
    "talker": OmniTalker,
    "qwen3_tts": SpeechTalker,
    "code2wav": Code2Wav,
}


def build(vllm_config: Any, settings: DeviceSettings) -> Stage:
    """The behaviour of the stage that *vllm_config* describes."""
    name = vllm_config.model_config.model_stage
    if name not in STAGES:
        raise NotImplementedError(f"model stage {name!r} is not simulated; known stages: {', '.join(STAGES)}")
    return STAGES[name](vllm_config, settings)
