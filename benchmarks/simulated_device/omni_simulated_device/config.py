"""Settings of the simulated device, read from ``OMNI_SIMULATED_DEVICE_CONFIG``.

The value is a JSON object, or the path of a file that holds one::

    {"seed": 7, "stages": {"*": {"base_ms": 5}, "thinker": {"base_ms": 20, "max_tokens": 80}}}

``stages`` maps a model stage as the deployment names it (``thinker``, ``talker``, ``qwen3_tts`` for the talker of
Qwen3-TTS, ``code2wav``) to its settings; ``*`` applies to every stage and the named stage wins over it. A key that does
not exist, or a value of the wrong kind, is refused: a benchmark must not run on a misspelt setting.
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


def light_engines() -> bool:
    """Whether this process was asked for light engines instead of stage processes."""
    return os.environ.get(ENABLE_VARIABLE) == "light"


def real_model() -> bool:
    """Whether this process was asked for the real runners on the processor instead of the clock."""
    return os.environ.get(ENABLE_VARIABLE) == "real"


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, what was found and what is allowed."""


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one stage's device costs and produces.

    One step takes ``base_ms`` + ``per_token_us`` x scheduled tokens + ``per_req_us`` x requests in the batch.
    """

    base_ms: Cost = 10.0
    """Fixed cost of a step, milliseconds."""
    per_token_us: Cost = 2.0
    """Cost of each scheduled token, microseconds."""
    per_req_us: Cost = 20.0
    """Cost of each request in the batch, microseconds."""
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
        return self.base_ms * 1e-3 + self.per_token_us * 1e-6 * tokens + self.per_req_us * 1e-6 * requests

    def __post_init__(self) -> None:
        for low, high in (("min_tokens", "max_tokens"), ("min_frames", "max_frames")):
            least, most = getattr(self, low), getattr(self, high)
            if not 1 <= least <= most:
                raise ValueError(f"{low}: found {least} with {high} {most}, allowed: 1 <= {low} <= {high}")


# Steps of about the length that the upstream recipes show on one H100, so that an unconfigured server behaves like one.
DEFAULTS: Mapping[str, StageSettings] = {
    "thinker": StageSettings(base_ms=15.0),
    "talker": StageSettings(base_ms=12.0),
    "qwen3_tts": StageSettings(base_ms=12.0),
    "code2wav": StageSettings(base_ms=8.0, per_token_us=0.5),
}


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
        stages = {}
        for name, usual in DEFAULTS.items():
            where = f"{CONFIG_VARIABLE}: stages.{name}"
            said = {**given.stages.get("*", {}), **given.stages.get(name, {})}  # type: ignore[call-overload]
            stages[name] = msgspec.convert({**msgspec.structs.asdict(usual), **said}, StageSettings)
    except OSError as error:
        raise ConfigError(f"{where}: found {text!r}, neither a JSON object nor a readable file ({error})") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return DeviceSettings(given.seed, stages)
