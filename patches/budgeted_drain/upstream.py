"""What the supported releases of upstream call differently, found by looking at what is there.

Looked at when this is imported, which is when the patch is installed, and when a loop is built; never for a raw output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.engine.stage_pool import StagePool

from .drain import Upstream
from .rounds import Body
from .routable import DefaultPolicy

try:
    from vllm_omni.outputs.output_modality import DRAINABLE_MODALITIES
except ImportError:  # up to 0.24
    from vllm_omni.engine.output_modality import DRAINABLE_MODALITIES

try:
    from vllm_omni.diffusion.data import is_diffusion_request_started_output as _is_diffusion_start
except ImportError:  # up to 0.28, where there is no such output

    def _is_diffusion_start(_output: Any) -> bool:
        return False


try:
    from vllm_omni.engine.orchestrator_monitor import OrchestratorMonitor
except ImportError:  # 0.22
    OrchestratorMonitor = None

try:
    from vllm_omni.data_entry_keys import FIRST_AUDIO_KEY as _FIRST_AUDIO_KEY
except ImportError:  # up to 0.30
    _FIRST_AUDIO_KEY = None

_DRAINABLE = tuple(sorted(str(modality) for modality in DRAINABLE_MODALITIES))
_HELPER = "_process_llm_stage_outputs"  # from 0.28
_KNOWS_AVAILABLE = hasattr(StagePool, "is_replica_available")  # from 0.26
_IS_TOLD = hasattr(OrchestratorMonitor, "set_dispatch_queue_size")  # from 0.30
_KEEPS_LAST_MESSAGE = "pending_final_output" in OrchestratorRequestState.__dataclass_fields__  # from 0.30


class _NoMonitor:
    """Stands where upstream has no monitor of the orchestrator's loop (0.22)."""

    def note_loop(self, *, idle: bool) -> None:
        """Nobody listens."""


def default_policy() -> DefaultPolicy:
    """A fresh default policy with upstream's names in it."""
    return DefaultPolicy(_DRAINABLE, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)


def upstream_of(orchestrator: Any, body: Body) -> Upstream:
    """What the loop of one orchestrator needs of upstream.

    Args:
        orchestrator: Upstream's.
        body: Its ``_orchestration_loop``, as a function of the orchestrator.
    """
    queue = orchestrator.output_async_queue  # from 0.32 a sink over the queue
    dequeue = AsyncMPClient.get_output_nowait  # nonblocking_dequeue's, or one of upstream's that behaves like it
    waiting = AsyncMPClient.get_output_async

    def can_dequeue(client: Any) -> bool:
        """Only where both dequeues are the ones that were verified: a subclass with its own knows why it has it."""
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
        read=getattr(StagePool, "read_llm_raw_output", None) or StagePool._poll_stage_raw,  # the first from 0.32
        available_ids=_available_ids,
        availability=_availability,
        can_exclude=_KNOWS_AVAILABLE,
        drops_statistics_alone=not _KNOWS_AVAILABLE,  # in the same releases
        keeps_last_message=_KEEPS_LAST_MESSAGE,
        first_audio_key=_FIRST_AUDIO_KEY,
        monitor=getattr(orchestrator, "_orch_monitor", None) or _NoMonitor(),
        front_end_queue=getattr(queue, "_sync_q", queue),
        body=None if hasattr(orchestrator, _HELPER) else body,
    )


def gauge_of(orchestrator: Any) -> Callable[[int], None] | None:
    """What upstream's event-driven loop tells how many raw outputs wait; None where it tells nobody."""
    if not _IS_TOLD or not isinstance(orchestrator._orch_monitor, OrchestratorMonitor):
        return None
    gauge: Callable[[int], None] = orchestrator._orch_monitor.set_dispatch_queue_size
    return gauge


if _KNOWS_AVAILABLE:

    def _available_ids(pool: Any) -> Sequence[int]:
        found: Sequence[int] = pool.available_replica_ids()
        return found

    def _availability(pool: Any) -> Callable[[int], bool]:
        found: Callable[[int], bool] = pool.is_replica_available
        return found

else:

    def _available_ids(pool: Any) -> Sequence[int]:
        found: Sequence[int] = pool.live_replica_ids()
        return found

    def _availability(pool: Any) -> Callable[[int], bool]:
        clients = pool.clients
        return lambda replica_id: clients[replica_id] is not None
