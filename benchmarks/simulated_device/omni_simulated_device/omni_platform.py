"""The platform as vLLM-Omni sees it."""

from typing import Any

import psutil
import torch
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from omni_simulated_device import config
from omni_simulated_device.vllm_platform import SimulatedPlatform


class SimulatedOmniPlatform(OmniPlatform, SimulatedPlatform):  # type: ignore[misc]
    """Names the workers, simulated or real, and answers vLLM-Omni's questions about devices."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Worker of thinker and talker stages."""
        if config.real_model():
            return "omni_simulated_device.real_worker.RealARWorker"
        return "omni_simulated_device.worker.SimulatedARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Worker of code2wav stages."""
        if config.real_model():
            return "omni_simulated_device.real_worker.RealGenerationWorker"
        return "omni_simulated_device.worker.SimulatedGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """Folder of upstream's bundled stage configs."""
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """There is nothing to compile."""
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:  # noqa: ARG003
        """The host."""
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        """Logical devices that a deploy file may name."""
        return 8

    @classmethod
    def get_device_version(cls) -> str | None:
        """None: there is no driver."""
        return None

    @classmethod
    def synchronize(cls) -> None:
        """Nothing is in flight outside the worker's own clock."""

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:  # noqa: ARG003
        """Free memory of the host, bytes."""
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:  # noqa: ARG003
        """Free and total memory of the host, bytes."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
