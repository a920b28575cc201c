"""The presets give the step times of the public tables, and a setting that is none is refused."""

from __future__ import annotations

import pytest

from omni_simulated_device import config
from omni_simulated_device.config import PRESETS


@pytest.mark.parametrize(
    ("preset", "stage", "within", "public_ms"),
    [
        # ../shared/facts/calibration.md, sections 1.1 to 1.3: milliseconds by requests in the batch
        ("h100", "thinker", 0.075, {1: 4.74, 4: 8.31, 8: 10.61, 16: 13.95, 32: 19.75}),
        ("h100", "talker", 0.04, {1: 9.53, 4: 13.18, 8: 16.02, 12: 19.18, 16: 21.81, 32: 33.56}),
        ("h100-own", "talker", 0.04, {1: 9.4, 16: 13.5, 32: 16.8, 64: 26.1}),
        ("tts-v2", "qwen3_tts", 0.02, {64: 36.5}),
        ("tts-v2-two", "qwen3_tts", 0.02, {64: 21.2}),
        ("tts-v1-custom-two", "qwen3_tts", 0.05, {1: 10.2, 8: 13.7}),
        ("tts-v1-base", "qwen3_tts", 0.01, {64: 75.6}),
    ],
)
def test_a_decoding_step_takes_what_was_published(
    preset: str, stage: str, within: float, public_ms: dict[int, float]
) -> None:
    """A step without prompts is as long as the public table says at each batch."""
    step_s = PRESETS[preset][stage].step_s
    assert {n: 1000 * step_s(n, n) for n in public_ms} == pytest.approx(public_ms, rel=within)


def test_a_prompt_costs_its_tokens() -> None:
    """40 to 46 ms for each further prompt of 2,500 tokens in the thinker's step."""
    step_s = PRESETS["h100"]["thinker"].step_s
    assert 40 <= 1000 * (step_s(2500 + 15, 16) - step_s(16, 16)) <= 46


def test_stages_override_the_preset() -> None:
    """A named stage wins over ``*``, that over the preset, and the preset over the usual device."""
    found = config.load('{"preset": "h100-own", "stages": {"*": {"base_ms": 1}, "code2wav": {"base_ms": 2}}}')
    talker = found.stage("talker")
    assert (talker.base_ms, talker.per_req_us, found.stage("code2wav").base_ms) == (1, 260, 2)
    assert config.load("{}").stage("qwen3_tts") == PRESETS["tts-v2"]["qwen3_tts"]
    assert config.load("{}").stage("code2wav") == PRESETS["h100"]["code2wav"]
