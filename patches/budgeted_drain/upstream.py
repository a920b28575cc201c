"""The parts of upstream's modules that the drain uses, and their names on each supported release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm_omni.data_entry_keys
import vllm_omni.diffusion.data
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.outputs.output_modality import DRAINABLE_MODALITIES

__all__ = ["EngineDeadError", "FinishReason", "RequestOutputKind"]


DRAINABLE = tuple(sorted(map(str, DRAINABLE_MODALITIES)))
"""The keys of a payload that upstream empties after each DELTA output. Any other key is repeated state."""


def _never(_output: Any) -> bool:
    return False


# From 0.30 on. 0.28 has no such output, and sends a request's last message at once.
is_diffusion_start: Callable[[Any], bool] = getattr(
    vllm_omni.diffusion.data, "is_diffusion_request_started_output", _never
)
KEEPS_LAST_MESSAGE = "pending_final_output" in OrchestratorRequestState.__dataclass_fields__

# From 0.32 on. Earlier, the function has another name, and no stage sends the first audio of another.
read = getattr(StagePool, "read_llm_raw_output", None) or StagePool._poll_stage_raw
FIRST_AUDIO_KEY: str | None = getattr(vllm_omni.data_entry_keys, "FIRST_AUDIO_KEY", None)


def can_dequeue(client: Any) -> bool:
    """Whether a client has both dequeues of ``AsyncMPClient``, the waiting and the other one, and overrides neither."""
    names = ("get_output_nowait", "get_output_async")
    return all(getattr(type(client), name, None) is getattr(AsyncMPClient, name) for name in names)


def gauge_of(orchestrator: Any) -> Callable[[int], None] | None:
    """Return the function to which upstream's event-driven loop reports its queued raw outputs, or None."""
    monitor = orchestrator._orch_monitor
    has_gauge = orchestrator._event_driven_orch and isinstance(monitor, OrchestratorMonitor)
    return getattr(monitor, "set_dispatch_queue_size", None) if has_gauge else None
