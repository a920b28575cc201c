"""The simulated device's settings are validated, and the package is inert unless it is switched on."""

import pytest

import omni_simulated_device
from omni_simulated_device import config


def test_named_stage_wins_over_star() -> None:
    """Settings under ``*`` reach every stage, and a stage's own settings win over them."""
    settings = config.load('{"seed": 3, "stages": {"*": {"base_ms": 5}, "talker": {"base_ms": 7, "min_frames": 2}}}')
    assert settings.seed == 3
    assert settings.stage("thinker").base_ms == 5
    assert (settings.stage("talker").base_ms, settings.stage("talker").min_frames) == (7, 2)


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ('{"sede": 1}', ["sede", "did you mean 'seed'", "allowed: seed, stages"]),
        ('{"stages": {"thinker": {"base_m": 1}}}', ["stages.thinker.base_m", "did you mean 'base_ms'", "per_req_us"]),
        ('{"stages": {"thinker": {"base_ms": -1}}}', ["stages.thinker.base_ms", "-1", "zero or more"]),
        ('{"stages": {"talker": {"min_frames": 500}}}', ["stages.talker.min_frames", "500", "max_frames"]),
        ("no-such-file.json", ["OMNI_SIMULATED_DEVICE_CONFIG", "no-such-file.json", "readable file"]),
    ],
)
def test_mistakes_are_named(raw: str, parts: list[str]) -> None:
    """An error names the key, what was found and what is allowed."""
    with pytest.raises(config.ConfigError) as caught:
        config.load(raw)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_entry_points_are_inert(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both entry points answer None unless the variable is exactly 1."""
    monkeypatch.delenv(omni_simulated_device.ENABLE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(omni_simulated_device.ENABLE_VARIABLE, value)
    assert omni_simulated_device.vllm_platform() is None
    assert omni_simulated_device.omni_platform() is None
