"""A lost, repeated or reordered chunk changes the answer of a simulated stage."""

from types import SimpleNamespace
from typing import Any

import pytest

from omni_simulated_device import config

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


def request(prompt: list[int], max_tokens: int | None = None) -> Any:
    """A new request, greedy."""
    values = {"max_tokens": max_tokens, "min_tokens": 0, "ignore_eos": False, "temperature": 0.0, "seed": None}
    return stages.RequestState("a", prompt, SimpleNamespace(**values, logprobs=None, prompt_logprobs=None), {})


def step(stage: Any, state: Any, scheduled: int) -> tuple[list[int], dict[str, Any]]:
    """Tokens and outputs of a step of one request."""
    result = stage.step(state, scheduled)
    return result.tokens, stage.outputs([result])


def talk(rows: list[Any]) -> list[list[int]]:
    """Frames that the talker publishes when the thinker's rows reach it one chunk a step."""
    stage = stages.build(vllm_config("talker"), SETTINGS)
    state = request([0] * 4)
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


def test_lost_or_swapped_rows_change_the_frames() -> None:
    """A row that is missing, repeated or out of order changes the talker's frames."""
    rows = thinker_rows([5, 6, 7], 5)
    frames = talk(rows)
    for damaged in (rows[:2] + rows[3:], [*rows[:2], rows[1], *rows[2:]], [rows[0], rows[2], rows[1], *rows[3:]]):
        assert talk(damaged) != frames
