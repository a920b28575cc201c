"""The limit: times that follow from the settings alone, and the real-time factors of public tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

pytest.importorskip("vllm_omni")

from benchmarks.ab.capture import Capture, chat_request, speech_request
from benchmarks.calibration import MEASURES, devices, rows
from benchmarks.limit import limit_of
from benchmarks.rigs import whole_server
from benchmarks.server.figures import figures
from benchmarks.server.load import Load
from omni_simulated_device import config, content

pytestmark = [pytest.mark.upstream]

FLAT = {"base_ms": 10, "alone_ms": 0, "saturating_ms": 0, "per_req_us": 0, "per_token_us": 0}
DEVICE: dict[str, Any] = {"stages": {"*": FLAT, "talker": {"frames_per_token": 2}}}
ASKED = chat_request("Hello", max_tokens=3, ignore_eos=True)
# The talker begins a hop after the thinker's second token and sends four frames in its fifth step, all in its seventh.
TIMES_MS: dict[str, list[float]] = {"text": [10, 20, 30], "audio": [21.5 + 50 + 1.5 + 10, 21.5 + 70 + 1.5 + 10]}


def times_ms(capture: Capture) -> dict[str, Any]:
    """When pieces came, milliseconds."""
    kinds = {"text": [each for each in capture.pieces if each.text], "audio": capture.audio_pieces}
    return {kind: [pytest.approx(1000 * each.at_s) for each in pieces] for kind, pieces in kinds.items()}


def test_one_request_takes_its_steps() -> None:
    """Each stage's steps, a hop between them, and chunks as the deploy YAML says."""
    [found] = limit_of([ASKED], "qwen3_omni", "qwen3_omni.yaml", DEVICE, streams=1)
    assert times_ms(found) == TIMES_MS
    assert [len(piece.audio) for piece in found.audio_pieces] == [4 * 3840, 2 * 3840]
    assert found.succeeded
    assert found.e2e_s == pytest.approx(TIMES_MS["audio"][-1] / 1000)


def test_speech() -> None:
    """Qwen3-TTS sends one frame first, then 25 at a time without those before."""
    device: dict[str, Any] = {"stages": {"*": FLAT, "qwen3_tts": {"min_frames": 30, "max_frames": 30}}}
    [found] = limit_of([speech_request("Hello")], "qwen3_tts", "qwen3_tts_v2.yaml", device, streams=1)
    assert times_ms(found)["audio"] == [20 + 11.5, 270 + 11.5, 310 + 11.5]
    assert [len(piece.audio) // 3840 for piece in found.audio_pieces] == [1, 25, 4]


@pytest.mark.parametrize("loop", [{"levels": (4,)}, {"levels": (2,), "loop": "open", "requests": 8}])
def test_half_the_pace_is_the_same_load(loop: dict[str, Any]) -> None:
    """At half the pace the device takes twice as long, and in its own seconds everything comes at the same time."""
    usual, slow = Load(tokens=20, **loop), Load(tokens=20, pace=2, **loop)
    steps_s = [config.load(json.dumps(each.device)).stage("thinker").step_s(8, 8) for each in (usual, slow)]
    assert steps_s[1] == pytest.approx(2 * steps_s[0])
    found = [figures(each.limit(each.levels[0]), cpu_s=1.0) for each in (usual, slow)]
    assert found[1] == pytest.approx(found[0])


@pytest.mark.parametrize("pace", [0.5, float("nan"), float("inf")])
def test_a_pace_that_is_none_is_refused(pace: float) -> None:
    """The device is not made faster than its GPU, and a pace is a number."""
    with pytest.raises(ValueError, match=r"pace: found .*, allowed: 1 and more"):
        Load(pace=pace)


@pytest.mark.parametrize("model", ["qwen3_omni", "qwen3_tts"])
def test_no_code_is_the_end_of_a_text(model: str) -> None:
    """At the tokenizer's end token vLLM ends a talker too: no codec id may be it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(whole_server.model_folder(model) / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") >= content.CODEBOOK_SIZE


@pytest.mark.parametrize("number", [2, 3])
def test_the_devices_alone_have_the_public_real_time_factor(number: int) -> None:
    """Eight streams, 1:1:1 and 1:2:2: within the tolerance of the public tables."""
    row = next(each for each in rows() if each.number == number)
    level = next(each for each in row.levels if each.at == 8)
    found = MEASURES["RTF"](devices(row, level.shortened()))
    assert found == pytest.approx(level.public["RTF"], rel=row.tolerance["RTF"])
    assert found == pytest.approx({2: 0.203, 3: 0.167}[number], rel=0.03)  # calibration.md, section 6
