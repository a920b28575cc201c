"""The demo's loads; no server is started."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("omni_simulated_device")

from benchmarks.demo.load import STAGES, loads
from benchmarks.rigs import whole_server


def test_the_device_configuration_is_one_the_device_accepts() -> None:
    """Step times and silent outputs are in force, and the deploy YAML is there."""
    import json

    from omni_simulated_device.config import load as device_settings

    settings = device_settings(json.dumps({"stages": STAGES}))
    for name, wanted in STAGES.items():
        assert msgspec.structs.asdict(settings.stage(name)).items() >= wanted.items()
    assert all(whole_server.deploy(load.deploy).is_file() for load in loads().values())
