"""A stage's step depends on the request's content and position, not on who asks, when, or beside whom."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omni_simulated_device import config, content

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")

from omni_simulated_device import stages  # noqa: E402

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

SETTINGS = config.load('{"stages": {"*": {"min_frames": 3, "max_frames": 9}}}')
EOS, CODEC_EOS = 151645, 2150


def vllm_config(stage: str) -> Any:
    """As much of a vLLM configuration as the stages read."""
    talker = SimpleNamespace(accept_hidden_layer=24, codec_eos_token_id=CODEC_EOS, num_code_groups=16)
    thinker = SimpleNamespace(text_config=SimpleNamespace(hidden_size=16))
    hf_config = SimpleNamespace(im_end_token_id=EOS, talker_config=talker, thinker_config=thinker)
    return SimpleNamespace(model_config=SimpleNamespace(model_stage=stage, hf_config=hf_config, max_model_len=4096))


def params(**values: Any) -> Any:
    """Sampling parameters, greedy unless told otherwise."""
    greedy = {"max_tokens": None, "min_tokens": 0, "ignore_eos": False, "temperature": 0.0, "seed": None}
    return SimpleNamespace(**{**greedy, "logprobs": None, "prompt_logprobs": None, **values})


def request(prompt: list[int], req_id: str = "a", info: dict[str, Any] | None = None, **values: Any) -> Any:
    """A new request."""
    return stages.RequestState(req_id, prompt, params(**values), info or {})


def step(stage: Any, state: Any, scheduled: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens and outputs of a step of one request."""
    result = stage.step(state, scheduled)
    return result.tokens, stage.outputs([result])


def run(stage: Any, state: Any, last: int, spans: Iterator[int] | None = None) -> list[int]:
    """Tokens of *state* until it ends with *last* or has 200."""
    tokens: list[int] = []
    while last not in tokens and len(tokens) < 200:
        span = next(spans) if spans is not None else 0
        missing = len(state.prompt_token_ids) - state.computed
        span = min(span or missing, missing) if missing > 0 else 1
        tokens += stage.step(state, span).tokens
        state.computed += span
    return tokens


def test_text_is_the_same_for_other_ids_and_spans() -> None:
    """Request id and chunked prefill leave the text alone; another prompt changes it."""
    stage = stages.build(vllm_config("thinker"), SETTINGS)
    first = run(stage, request([5, 6, 7]), EOS)
    assert first == run(stage, request([5, 6, 7], "b"), EOS, iter([2, 1] + [1] * 200))
    assert first != run(stage, request([5, 6, 8]), EOS)
    assert 20 <= len(first) <= 60


def talk(rows: list[Any], req_id: str = "a") -> list[list[int]]:
    """Frames that the talker publishes when the thinker's rows reach it one chunk a step."""
    stage = stages.build(vllm_config("talker"), SETTINGS)
    state = request([0] * 4, req_id)
    frames = []
    for index in range(64):
        step_rows = rows[index] if index < len(rows) else None
        name = "prefill" if index == 0 else "decode"
        state.info = {"embed": {name: step_rows}} if step_rows is not None else {}
        tokens, outputs = step(stage, state, 4 if index == 0 else 1)
        state.computed += 4 if index == 0 else 1
        frames += [frame for frame in outputs["codes.audio"].tolist() if any(frame)]
        if tokens == [CODEC_EOS]:
            return frames
    raise AssertionError("the talker did not end")


def thinker_rows(prompt: list[int], steps: int) -> list[Any]:
    """Chunks as the connector delivers them: the prompt with the first token, then one row each."""
    stage = stages.build(vllm_config("thinker"), SETTINGS)
    state = request(prompt, max_tokens=6)
    rows = []
    for span in [len(prompt)] + [1] * steps:
        _, outputs = step(stage, state, span)
        state.computed += span
        rows.append(outputs["hidden_states.layer_0"])
    return [torch.cat(rows[:2]), *rows[2:]]


def test_frames_follow_from_the_thinkers_rows() -> None:
    """The talker's frames depend on the prompt that the rows were made from, and not on ids."""
    frames = talk(thinker_rows([5, 6, 7], 5))
    assert frames == talk(thinker_rows([5, 6, 7], 5), "b")
    assert frames != talk(thinker_rows([5, 6, 8], 5))
    assert 6 <= len(frames) <= 9


def test_lost_or_swapped_rows_change_the_frames() -> None:
    """A row that is missing, repeated or out of order is heard from there on."""
    rows = thinker_rows([5, 6, 7], 5)
    frames = talk(rows)
    for damaged in (rows[:2] + rows[3:], [*rows[:2], rows[1], *rows[2:]], [rows[0], rows[2], rows[1], *rows[3:]]):
        assert talk(damaged) != frames


def test_audio_is_cut_anywhere_alike() -> None:
    """Audio of frames is the same however they are chunked, left context excluded."""
    stage = stages.build(vllm_config("code2wav"), SETTINGS)
    frames = torch.tensor([content.codec_frame(b"k" * 8, index, 16) for index in range(6)])

    def audio(part: Any, left: int = 0) -> Any:
        flat = part.T.reshape(-1).tolist()
        _, outputs = step(stage, request(flat, info={"meta": {"left_context_size": left}}), len(flat))
        assert outputs["sr"][0].item() == 24000
        return outputs["model_outputs"][0]

    whole = audio(frames)
    assert whole.shape == (1, 6 * content.SAMPLES_A_FRAME)
    assert torch.equal(whole, torch.cat([audio(frames[:2]), audio(frames[1:], left=1)], dim=1))
