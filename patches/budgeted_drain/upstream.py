"""What the supported releases of upstream call differently. Looked at on import and when a loop is built."""

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

from .drain import Upstream
from .routable import DefaultPolicy

_DRAINABLE = tuple(sorted(str(modality) for modality in DRAINABLE_MODALITIES))


def _never(_output: Any) -> bool:
    return False


# In 0.30 and later; 0.28 has no such output, no such gauge, and sends a request's last message at once.
_is_diffusion_start = getattr(vllm_omni.diffusion.data, "is_diffusion_request_started_output", _never)
_HAS_GAUGE = hasattr(OrchestratorMonitor, "set_dispatch_queue_size")
_KEEPS_LAST_MESSAGE = "pending_final_output" in OrchestratorRequestState.__dataclass_fields__

# In 0.32 and later; before, the reading is ``_poll_stage_raw``, and no stage sends another's first audio.
_read = getattr(StagePool, "read_llm_raw_output", None) or StagePool._poll_stage_raw
_FIRST_AUDIO_KEY = getattr(vllm_omni.data_entry_keys, "FIRST_AUDIO_KEY", None)


def default_policy() -> DefaultPolicy:
    """A fresh default policy with upstream's names in it."""
    return DefaultPolicy(_DRAINABLE, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)


def upstream_of(orchestrator: Any) -> Upstream:
    """What the loop of one orchestrator needs of upstream."""
    dequeue = AsyncMPClient.get_output_nowait  # nonblocking_dequeue's, or one of upstream's that behaves like it
    waiting = AsyncMPClient.get_output_async

    def can_dequeue(client: Any) -> bool:
        kind = type(client)
        return (
            getattr(kind, "get_output_nowait", None) is dequeue and getattr(kind, "get_output_async", None) is waiting
        )

    return Upstream(
        dead_error=EngineDeadError,
        is_diffusion_start=_is_diffusion_start,
        dequeue=dequeue,
        can_dequeue=can_dequeue,
        error_reason=FinishReason.ERROR,
        read=_read,
        keeps_last_message=_KEEPS_LAST_MESSAGE,
        first_audio_key=_FIRST_AUDIO_KEY,
        monitor=orchestrator._orch_monitor,
    )


def gauge_of(orchestrator: Any) -> Callable[[int], None] | None:
    """What upstream's event-driven loop tells how many raw outputs wait; None where it tells nobody."""
    if not _HAS_GAUGE or not isinstance(orchestrator._orch_monitor, OrchestratorMonitor):
        return None
    gauge: Callable[[int], None] = orchestrator._orch_monitor.set_dispatch_queue_size
    return gauge
