"""The functions and attributes of each release that ``budgeted_drain`` replaces or uses."""

from __future__ import annotations

from collections.abc import Iterator

from omni_fastpath.declare import AnySeam, Fit, Relies, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"


def _methods(module: str, owner: str, names: str) -> Iterator[Relies]:
    return (Relies(module, f"{owner}.{name}") for name in names.split())


def _seams(owner: str, read: str, *more: AnySeam) -> tuple[AnySeam, ...]:
    """Return both loops and the upstream functions that they call.

    Args:
        owner: The orchestrator's class.
        read: The stage pool's reading of a client.
        more: What only some releases have.
    """
    handling = "_process_llm_stage_outputs _handle_processed_outputs _finish_raw_terminal_requests"
    polling = "poll_llm_raw_output poll_diffusion_output record_output_timestamps"
    return (
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop", wrapper="wrapped_loop"),
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop_event_driven", wrapper="wrapped_loop"),
        Wrap(STAGE_POOL, "StagePool.add_client", wrapper="wrapped_add_client"),
        Relies(ORCHESTRATOR, owner),
        *_methods(ORCHESTRATOR, owner, f"{handling} _handle_dead_replica _absorb_diffusion_metrics"),
        Relies(STAGE_POOL, "StagePool"),
        *_methods(STAGE_POOL, "StagePool", f"{polling} available_replica_ids is_replica_available {read}"),
        Relies(MONITOR, "OrchestratorMonitor.note_loop"),
        Relies(MONITOR, "_NullOrchestratorMonitor.note_loop"),
        Relies("vllm.v1.engine.core_client", "AsyncMPClient"),
        *more,
    )


_FROM_0_30 = (
    Relies(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size"),
    Relies("vllm_omni.diffusion.data", "is_diffusion_request_started_output"),
)

ROWS = (
    Fit(releases=("0.28.0",), seams=_seams("Orchestrator", "_poll_stage_raw")),
    Fit(releases=("0.30.0",), seams=_seams("OrchestratorBase", "_poll_stage_raw", *_FROM_0_30)),
    Fit(
        releases=("0.32.0rc1",),
        preview=True,
        seams=_seams("OrchestratorBase", "read_llm_raw_output", *_FROM_0_30),
    ),
)
