"""A vLLM-Omni platform whose device is a clock.

The servers, orchestrator, schedulers, connectors and stage processes are upstream's own; only the worker is ours. It
sleeps for as long as a configured device would take and answers with tokens, hidden states, codec frames and audio
that follow from the content of the request alone, so that two servers can be compared byte for byte.

The package is inert unless ``OMNI_SIMULATED_DEVICE=1``. ``OMNI_SIMULATED_DEVICE_CONFIG`` holds the settings, as JSON
text or as the path of a JSON file (see `config`). This module is imported in every process that vLLM starts, so it
imports nothing but the standard library.
"""

import os

ENABLE_VARIABLE = "OMNI_SIMULATED_DEVICE"
CONFIG_VARIABLE = "OMNI_SIMULATED_DEVICE_CONFIG"


def enabled() -> bool:
    """Whether this process was asked to use the simulated device."""
    return os.environ.get(ENABLE_VARIABLE) == "1"


def vllm_platform() -> str | None:
    """Entry point in ``vllm.platform_plugins``: the platform class by name, or None when switched off."""
    return "omni_simulated_device.vllm_platform.SimulatedPlatform" if enabled() else None


def omni_platform() -> str | None:
    """Entry point in ``vllm_omni.platform_plugins``: the platform class by name, or None when switched off."""
    return "omni_simulated_device.omni_platform.SimulatedOmniPlatform" if enabled() else None
