"""The parts of upstream's modules that the drain uses, and their names on each supported release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm_omni.diffusion.data
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor
from vllm_omni.engine.stage_pool import StagePool

__all__ = ["EngineDeadError"]


# From 0.30 on. 0.28 has no such output.
is_diffusion_start: Callable[[Any], bool] = getattr(
    vllm_omni.diffusion.data, "is_diffusion_request_started_output", lambda _output: False
)

# From 0.32 on. Earlier, the function has another name.
read = getattr(StagePool, "read_llm_raw_output", None) or StagePool._poll_stage_raw


def can_dequeue(client: Any) -> bool:
    """Whether a client has both dequeues of ``AsyncMPClient``, the waiting and the other one, and overrides neither."""
    names = ("get_output_nowait", "get_output_async")
    return all(getattr(type(client), name, None) is getattr(AsyncMPClient, name) for name in names)


def gauge_of(orchestrator: Any) -> Callable[[int], None] | None:
    """Return the function to which upstream's event-driven loop reports its queued raw outputs, or None."""
    monitor = orchestrator._orch_monitor
    has_gauge = orchestrator._event_driven_orch and isinstance(monitor, OrchestratorMonitor)
    return getattr(monitor, "set_dispatch_queue_size", None) if has_gauge else None
