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
    ("raw", "message"),
    [
        ('{"stages": {"thinkr": {}}}', "'thinkr'"),
        ('{"stages": {"thinker": {"base_ms": -1}}}', "stages.thinker: Expected `float` >= 0.0 .*base_ms"),
        ('{"stages": {"talker": {"min_frames": 500}}}', "stages.talker: min_frames: found 500 with max_frames"),
        ("no-such-file.json", "OMNI_SIMULATED_DEVICE_CONFIG: found 'no-such-file.json'.*readable file"),
    ],
)
def test_mistakes_are_named(raw: str, message: str) -> None:
    """An error names the key and what is wrong with it."""
    with pytest.raises(config.ConfigError, match=message):
        config.load(raw)


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_entry_points_are_inert(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both entry points answer None unless the variable is exactly 1."""
    monkeypatch.delenv(omni_simulated_device.ENABLE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(omni_simulated_device.ENABLE_VARIABLE, value)
    assert omni_simulated_device.vllm_platform() is None
    assert omni_simulated_device.omni_platform() is None
