"""The platform as vLLM sees it. This module must not import vllm_omni: vLLM resolves its platform first."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from omni_simulated_device import config


class SimulatedPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform, with the executor and the scheduling that a GPU deployment would have."""

    # CpuPlatform reads its own variable as NUMA nodes, so a deploy file's `devices: "1"` would ask for a second node.
    device_control_env_var = "OMNI_SIMULATED_DEVICE_VISIBLE"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Let CpuPlatform adapt *vllm_config*, then put back what it changes only because CPU kernels need it."""
        config.load()  # a bad setting stops the server here, in the first process that builds a config
        if config.light_engines():
            # Here and not when the platform is found: by now upstream's modules are complete, and no stage is launched.
            from omni_simulated_device.light import manager

            manager.install()
        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        backend, async_scheduling = parallel.distributed_executor_backend, scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        parallel.distributed_executor_backend = backend
        scheduler.async_scheduling = async_scheduling
