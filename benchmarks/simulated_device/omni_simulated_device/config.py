"""Settings of the simulated device, read from ``OMNI_SIMULATED_DEVICE_CONFIG``.

The value is a JSON object, or the path of a file that holds one::

    {"seed": 7, "stages": {"*": {"base_ms": 5}, "thinker": {"base_ms": 20, "max_tokens": 80}}}

``stages`` maps a model stage as the deployment names it (``thinker``, ``talker``, ``qwen3_tts`` for the talker of
Qwen3-TTS, ``code2wav``) to its settings; ``*`` applies to every stage and the named stage wins over it. A key that does
not exist, or a value of the wrong kind, is refused: a benchmark must not run on a misspelt setting.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omni_simulated_device import CONFIG_VARIABLE, ENABLE_VARIABLE


def light_engines() -> bool:
    """Whether this process was asked for light engines instead of stage processes."""
    return os.environ.get(ENABLE_VARIABLE) == "light"


def real_model() -> bool:
    """Whether this process was asked for the real runners on the processor instead of the clock."""
    return os.environ.get(ENABLE_VARIABLE) == "real"


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, what was found and what is allowed."""


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """What one stage's device costs and produces.

    One step takes ``base_ms`` + ``per_token_us`` x scheduled tokens + ``per_req_us`` x requests in the batch.
    """

    base_ms: float = 10.0
    """Fixed cost of a step, milliseconds."""
    per_token_us: float = 2.0
    """Cost of each scheduled token, microseconds."""
    per_req_us: float = 20.0
    """Cost of each request in the batch, microseconds."""
    min_tokens: int = 20
    """Thinker: fewest text tokens of a request, the end-of-sequence token included."""
    max_tokens: int = 60
    """Thinker: most text tokens of a request that is not told to ignore the end of sequence."""
    min_frames: int = 40
    """Talkers: fewest codec frames of a request."""
    max_frames: int = 120
    """Talkers: most codec frames of a request (a Qwen3-Omni talker takes at least one step per text token)."""
    hidden_size: int = 0
    """Thinker: width of the hidden-state rows sent to the talker, elements of 2 bytes; 0: the model's own."""
    samples_per_frame: int = 1920
    """Code2wav: audio samples made of one codec frame (24 kHz / 12.5 Hz = 1920)."""
    silent: int = 0
    """Code2wav of light engines: outputs without audio, a step each, before each one with."""
    kv_cache_mib: int = 8192
    """Pretended KV cache memory, MiB; only block accounting, nothing is allocated."""


@dataclasses.dataclass(frozen=True)
class DeviceSettings:
    """The whole configuration."""

    seed: int = 0
    """Changes every token, frame and sample; two servers with the same seed answer alike."""
    stages: Mapping[str, StageSettings] = dataclasses.field(default_factory=dict)
    """Settings per model stage, ``*`` already applied."""

    def stage(self, name: str) -> StageSettings:
        """Settings of the model stage *name*; the defaults when it is not configured."""
        return self.stages.get(name, self.stages.get("*", DEFAULTS.get(name, StageSettings())))


STAGE_NAMES = ("*", "thinker", "talker", "qwen3_tts", "code2wav")

# Steps of about the length that the upstream recipes show on one H100, so that an unconfigured server behaves like one.
DEFAULTS: Mapping[str, StageSettings] = {
    "thinker": StageSettings(base_ms=15.0),
    "talker": StageSettings(base_ms=12.0),
    "qwen3_tts": StageSettings(base_ms=12.0),
    "code2wav": StageSettings(base_ms=8.0, per_token_us=0.5),
}


def load(raw: str | None = None) -> DeviceSettings:
    """Parse *raw*, or the environment variable when *raw* is None, into validated settings."""
    if raw is None:
        raw = os.environ.get(CONFIG_VARIABLE, "")
    text = raw.strip()
    if text and not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{CONFIG_VARIABLE}: found {raw!r}, which is neither a JSON object nor a readable file ({error})"
            ) from error
    try:
        data = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: not valid JSON: {error}") from error
    return _device_settings(data)


def _device_settings(data: object) -> DeviceSettings:
    root = _mapping("", data)
    _only(root, ("seed", "stages"), "")
    seed = root.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed: found {seed!r}, allowed: an integer")
    given = _mapping("stages", root.get("stages", {}))
    _only(given, STAGE_NAMES, "stages.")
    common = _mapping("stages.*", given.get("*", {}))
    stages: dict[str, StageSettings] = {}
    for name in STAGE_NAMES:
        values = {**common, **_mapping(f"stages.{name}", given.get(name, {}))}
        stages[name] = _stage_settings(f"stages.{name}", values, DEFAULTS.get(name, StageSettings()))
    return DeviceSettings(seed=seed, stages=stages)


def _stage_settings(path: str, values: Mapping[str, Any], base: StageSettings) -> StageSettings:
    fields = {field.name: field for field in dataclasses.fields(StageSettings)}
    _only(values, fields, f"{path}.")
    for name, value in values.items():
        wants_integer = fields[name].type in (int, "int")
        kinds = (int,) if wants_integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:
            kind = "an integer" if wants_integer else "a number"
            raise ConfigError(f"{path}.{name}: found {value!r}, allowed: {kind} that is zero or more")
    settings = dataclasses.replace(base, **values)
    for low, high in (("min_tokens", "max_tokens"), ("min_frames", "max_frames")):
        least, most = getattr(settings, low), getattr(settings, high)
        if not 1 <= least <= most:
            raise ConfigError(f"{path}.{low}: found {least} with {high} {most}, allowed: 1 <= {low} <= {high}")
    if settings.samples_per_frame < 1:
        raise ConfigError(f"{path}.samples_per_frame: found 0, allowed: 1 or more")
    return settings


def _mapping(path: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path or CONFIG_VARIABLE}: found {value!r}, allowed: a JSON object")
    return value


def _only(values: Mapping[str, Any], allowed: Iterable[str], prefix: str) -> None:
    names = list(allowed)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{prefix}{key}: unknown key, found {key!r}{hint}, allowed: {', '.join(names)}")
