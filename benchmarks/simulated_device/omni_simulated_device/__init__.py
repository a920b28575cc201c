"""A vLLM-Omni platform whose device is a clock.

The servers, orchestrator, schedulers, connectors and stage processes are upstream's own; only the worker is ours. It
sleeps for as long as a configured device would take and answers with tokens, hidden states, codec frames and audio
that follow from the content of the request alone, so that two servers can be compared byte for byte.

The package is inert unless ``OMNI_SIMULATED_DEVICE=1``; with ``real`` the device is the processor and the model a
tiny real one (see `real_worker`), with ``light`` there are no stage processes (see `light`).
``OMNI_SIMULATED_DEVICE_CONFIG`` holds the settings, as JSON text or as the path of a JSON file (see `config`);
``OMNI_SIMULATED_DEVICE_SLOW_SENDS`` makes sends slow (see `slow_sends`), ``OMNI_SIMULATED_DEVICE_WITHOUT`` takes parts
out of omni-fastpath's patches (see `without`). This module is imported in every process that vLLM starts, so it imports
nothing but the standard library.
"""

import os

ENABLE_VARIABLE = "OMNI_SIMULATED_DEVICE"
CONFIG_VARIABLE = "OMNI_SIMULATED_DEVICE_CONFIG"
SLOW_SENDS_VARIABLE = "OMNI_SIMULATED_DEVICE_SLOW_SENDS"
WITHOUT_VARIABLE = "OMNI_SIMULATED_DEVICE_WITHOUT"


def enabled() -> bool:
    """Whether this process was asked to use the simulated device."""
    return os.environ.get(ENABLE_VARIABLE) in {"1", "real", "light"}


def vllm_platform() -> str | None:
    """Entry point in ``vllm.platform_plugins``: the platform class by name, or None when switched off."""
    return _platform("omni_simulated_device.vllm_platform.SimulatedPlatform")


def omni_platform() -> str | None:
    """Entry point in ``vllm_omni.platform_plugins``: the platform class by name, or None when switched off."""
    return _platform("omni_simulated_device.omni_platform.SimulatedOmniPlatform")


def _platform(name: str) -> str | None:
    if not enabled():
        return None
    if os.environ.get(SLOW_SENDS_VARIABLE):
        from omni_simulated_device import slow_sends

        slow_sends.arm()
    if parts := os.environ.get(WITHOUT_VARIABLE):
        from omni_simulated_device import without

        without.take_out(parts)
    return name
