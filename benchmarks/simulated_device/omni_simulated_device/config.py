"""Settings of the simulated device, read from ``OMNI_SIMULATED_DEVICE_CONFIG``.

The value is a JSON object, or the path of a file that holds one::

    {"seed": 7, "preset": "h100-own", "stages": {"*": {"per_token_us": 0}, "thinker": {"max_tokens": 80}}}

``preset`` names a device of `PRESETS`; unless given, it is one H100 for the thinker, one for talker and code2wav, and
one for Qwen3-TTS. ``stages`` changes it: it maps a model stage as the deployment names it (``thinker``, ``talker``,
``qwen3_tts`` for the talker of Qwen3-TTS, ``code2wav``) to settings; ``*`` applies to every stage and the named stage
wins over it. A key that does not exist, or a value of the wrong kind, is refused: a benchmark must not run on a
misspelt setting.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from omni_simulated_device import CONFIG_VARIABLE, ENABLE_VARIABLE

KV_CACHE_MIB = 8192
"""Pretended KV cache memory of a stage, MiB; only block accounting, nothing is allocated."""

Cost = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Pace = Annotated[float, msgspec.Meta(ge=1)]


def light_engines() -> bool:
    """Whether this process was asked for light engines instead of stage processes."""
    return os.environ.get(ENABLE_VARIABLE) == "light"


def real_model() -> bool:
    """Whether this process was asked for the real runners on the processor instead of the clock."""
    return os.environ.get(ENABLE_VARIABLE) == "real"


_UNREAD = 1 - 8 / 128
"""Share of the experts that a token does not need."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, what was found and what is allowed."""


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one stage's device costs and produces.

    A step of n requests takes ``base_ms`` + ``saturating_ms`` x (1 - (15/16)^n) + ``per_req_us`` x n, and
    ``per_token_us`` for each scheduled token but one a request: what decoding costs is in the other terms.
    """

    base_ms: Cost = 0.0
    """Fixed cost of a step, milliseconds."""
    alone_ms: Cost = 0.0
    """The same where the batch is one request; 0: no difference."""
    saturating_ms: Cost = 0.0
    """Cost of reading all experts, 8 of 128 of which each token needs, milliseconds."""
    per_req_us: Cost = 0.0
    """Cost of each request in the batch, microseconds."""
    per_token_us: Cost = 0.0
    """Cost of each token of a prompt or of a chunk, microseconds."""
    pace: Pace = 1.0
    """A step, and light engines' hop to the next stage, take so many times as long, for a machine with slower cores."""
    min_tokens: Count = 20
    """Thinker: fewest text tokens of a request, the end-of-sequence token included."""
    max_tokens: Count = 60
    """Thinker: most text tokens of a request that is not told to ignore the end of sequence."""
    min_frames: Count = 40
    """Talkers: fewest codec frames of a request."""
    max_frames: Count = 120
    """Talkers: most codec frames of a request (a Qwen3-Omni talker takes at least one step per text token)."""
    frames_per_token: Cost = 0.0
    """Qwen3-Omni's talker: codec frames for each text token, in the place of the two above; 0: they decide."""
    silent: Count = 0
    """Code2wav of light engines: outputs without audio, a step each, before each one with."""

    def step_s(self, tokens: int, requests: int) -> float:
        """What a step of so many tokens and requests takes, seconds."""
        base_ms = self.alone_ms if self.alone_ms and requests == 1 else self.base_ms
        fixed_ms = base_ms + self.saturating_ms * (1 - _UNREAD**requests)
        growing_us = self.per_req_us * requests + self.per_token_us * max(0, tokens - requests)
        return self.pace * (fixed_ms * 1e-3 + growing_us * 1e-6)

    def __post_init__(self) -> None:
        for low, high in (("min_tokens", "max_tokens"), ("min_frames", "max_frames")):
            least, most = getattr(self, low), getattr(self, high)
            if not 1 <= least <= most:
                raise ValueError(f"{low}: found {least} with {high} {most}, allowed: 1 <= {low} <= {high}")


# Fitted to public tables; what each is worth: ../README.md. The numbers of issues and pull requests are vllm-omni's.
_THINKER = StageSettings(
    # CI, text only, 2500 tokens in and 900 out: 4.36, 7.67, 9.86, 13.1, 18.7 s end to end at 1, 4, 8, 16, 32 (#6201),
    # which is 4.7, 8.3, 10.6, 14.0, 19.8 ms a step. Fitted to the seconds; no affine form comes as near.
    base_ms=4.0,
    saturating_ms=16.5,  # 57 GB of experts at 3.35 TB/s are 17
    per_token_us=17,  # 40 to 46 ms more for each further prompt of a wave (the same tables)
)
PRESETS: Mapping[str, Mapping[str, StageSettings]] = {
    "h100": {
        "thinker": _THINKER,
        "talker": StageSettings(
            # CI, 1:1:1 and 1:2:2: 13.2, 16.0, 21.8, 33.6 ms a frame at 4, 8, 16, 32; 9.5 alone (#6201).
            base_ms=10.4,
            per_req_us=730,  # 270 of it Python in the stage process (#4383), the rest code2wav's share of the GPU
            alone_ms=8.8,
            per_token_us=4,  # no public number: a tenth of the thinker's weights
        ),
        # Windows of 9 ms behind a talker (sglang-omni #1567), a batch nearly serial (vllm-omni #3322): +-40 %.
        "code2wav": StageSettings(base_ms=8, per_token_us=8.5),
    },
    "h100-own": {
        "thinker": _THINKER,
        # vLLM-Omni's blog of 2026-07-01: 9.4, 13.5, 16.8, 26.1 ms a frame at 1, 16, 32, 64.
        "talker": StageSettings(base_ms=9.1, per_req_us=260, per_token_us=4),
        # 3 to 5 ms a window (Qwen's report); 8.3 ms at most (#7781): +-40 %.
        "code2wav": StageSettings(base_ms=5, per_token_us=4.7),
    },
    "tts-v2": {
        # Base, one H100, 64 requests: 140.2 s of audio a second are 36.5 ms a frame (#7781, 2026-09-20).
        "qwen3_tts": StageSettings(base_ms=10, per_req_us=420, per_token_us=10),
        "code2wav": StageSettings(base_ms=8, per_token_us=12),  # 3 ms more for 25 frames on a GPU of its own
    },
    "tts-v2-two": {
        # Two H200, 64 requests: 241.1 s of audio a second are 21 ms a frame at most (#7781).
        "qwen3_tts": StageSettings(base_ms=9.8, per_req_us=180, per_token_us=10),
        "code2wav": StageSettings(base_ms=5, per_token_us=7.5),
    },
    "tts-v1-custom-two": {
        # CI, CustomVoice, two H100: 10.2 and 13.7 ms a frame at 1 and 8 (test_tts.json, 2026-08).
        "qwen3_tts": StageSettings(base_ms=9.8, per_req_us=420, per_token_us=10),
        "code2wav": StageSettings(base_ms=5, per_token_us=7.5),
    },
    "tts-v1-base": {
        # Base, one H100, 64 requests: 67.7 s of audio a second are 75.6 ms a frame (#7781, 2026-09-18).
        "qwen3_tts": StageSettings(base_ms=10, per_req_us=1020, per_token_us=10),
        "code2wav": StageSettings(base_ms=8, per_token_us=12),
    },
}
"""Devices by name, each with the stages that run on it: Qwen3-Omni's default YAML, in which talker and code2wav share a
GPU; the same with a GPU for each stage; Qwen3-TTS on one GPU and on two, by model runner."""

USUAL: Mapping[str, StageSettings] = {**PRESETS["tts-v2"], **PRESETS["h100"]}
"""What stands where no preset says anything of a stage."""


class DeviceSettings(msgspec.Struct, frozen=True):
    """The whole configuration.

    Attributes:
        seed: Changes every token, frame and sample; two servers with the same seed answer alike.
        stages: Settings of every model stage, ``*`` already applied.
    """

    seed: int
    stages: Mapping[str, StageSettings]

    def stage(self, name: str) -> StageSettings:
        """Settings of the model stage *name*."""
        return self.stages[name]


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    seed: int = 0
    preset: str | None = None
    stages: dict[Literal["*", "thinker", "talker", "qwen3_tts", "code2wav"], dict[str, Any]] = {}


def load(raw: str | None = None) -> DeviceSettings:
    """Parse *raw*, or the environment variable when *raw* is None, into validated settings.

    Raises:
        ConfigError: It cannot be used.
    """
    text = (os.environ.get(CONFIG_VARIABLE, "") if raw is None else raw).strip()
    where = CONFIG_VARIABLE
    try:
        if text and not text.startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        given = msgspec.json.decode(text or "{}", type=_Given)
        if given.preset is not None and given.preset not in PRESETS:
            raise ConfigError(f"{where}: preset: found {given.preset!r}, allowed: {', '.join(PRESETS)}")
        stages = {}
        for name, usual in {**USUAL, **PRESETS.get(given.preset or "", {})}.items():
            where = f"{CONFIG_VARIABLE}: stages.{name}"
            said = {**given.stages.get("*", {}), **given.stages.get(name, {})}  # type: ignore[call-overload]
            stages[name] = msgspec.convert({**msgspec.structs.asdict(usual), **said}, StageSettings)
    except OSError as error:
        raise ConfigError(f"{where}: found {text!r}, neither a JSON object nor a readable file ({error})") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return DeviceSettings(given.seed, stages)
