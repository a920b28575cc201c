"""The simulated device is inert unless it is switched on."""

import pytest

import omni_simulated_device


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_entry_points_are_inert(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both entry points answer None unless the variable is exactly 1."""
    monkeypatch.delenv(omni_simulated_device.ENABLE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(omni_simulated_device.ENABLE_VARIABLE, value)
    assert omni_simulated_device.vllm_platform() is None
    assert omni_simulated_device.omni_platform() is None
