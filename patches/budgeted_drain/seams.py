"""The functions and attributes of each release that ``budgeted_drain`` replaces or uses."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Reads, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"

_OWN = ("_shutdown_event", "request_states", "stage_pools", "num_stages", "_event_driven_orch", "_orch_monitor")
_STATE = ("stage_submit_ts", "streaming", "final_output_stage_ids", "final_stage_id", "sampling_params_list")
_ENTRY = ("request_id", "finish_reason", "is_segment_finished", "kv_transfer_params", "multimodal_output")


def _seams(owner: str, read: str, *more: AnySeam) -> tuple[AnySeam, ...]:
    """Return both loops and the upstream functions that they call.

    Args:
        owner: The orchestrator's class.
        read: The stage pool's reading of a client.
        more: What only some releases have.
    """
    relied_on = ("_route_output", "_finish_raw_terminal_requests")
    called = ("_process_llm_stage_outputs", "_handle_processed_outputs", "_handle_dead_replica")
    also_called = ("_fail_request_dead_stage", "_absorb_diffusion_metrics")
    of_pool = ("available_replica_ids", "live_replica_ids", "get_bound_replica_id", "poll_diffusion_output")
    return (
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop", wrapper="wrapped_loop"),
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop_event_driven", wrapper="wrapped_loop"),
        Wrap(STAGE_POOL, "StagePool.add_client", wrapper="wrapped_add_client"),
        *(Pin(ORCHESTRATOR, f"{owner}.{name}") for name in relied_on),
        *(Pin(STAGE_POOL, f"StagePool.{name}") for name in ("poll_llm_raw_output", read, "is_replica_available")),
        *(Call(ORCHESTRATOR, f"{owner}.{name}") for name in (*called, *also_called)),
        *(Call(STAGE_POOL, f"StagePool.{name}") for name in (*of_pool, "record_output_timestamps")),
        Call(MONITOR, "OrchestratorMonitor.note_loop"),
        Call(MONITOR, "_NullOrchestratorMonitor.note_loop"),
        Call("vllm_omni.outputs.mm_outputs", "MultimodalPayload.get"),
        Call("vllm.v1.engine.core_client", "MPClient.shutdown"),
        Reads(ORCHESTRATOR, owner, _OWN),
        Reads(STAGE_POOL, "StagePool", ("clients", "stage_type", "final_output", "_unavailable_replicas")),
        Reads(ORCHESTRATOR, "OrchestratorRequestState", _STATE),
        Reads(ORCHESTRATOR, "StreamingInputState", ("enabled",)),
        Reads("vllm.v1.engine.core_client", "AsyncMPClient", ("outputs_queue",)),
        Reads("vllm_omni.engine", "OmniEngineCoreOutputs", ("outputs", "scheduler_stats", "finished_requests")),
        Reads("vllm_omni.engine", "OmniEngineCoreOutput", _ENTRY),
        Reads("vllm_omni.outputs", "OmniRequestOutput", ("request_id", "finished", "error", "outputs")),
        Reads("vllm.outputs", "CompletionOutput", ("text", "token_ids")),
        *more,
    )


_FROM_0_30 = (
    Call(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size"),
    Call("vllm_omni.diffusion.data", "is_diffusion_request_started_output"),
)
_FROM_0_32 = Pin(ORCHESTRATOR, "OrchestratorBase._route_upstream_first_audio")

_0_28 = _seams("Orchestrator", "_poll_stage_raw")
_0_30 = _seams("OrchestratorBase", "_poll_stage_raw", *_FROM_0_30)
_0_32 = _seams("OrchestratorBase", "read_llm_raw_output", *_FROM_0_30, _FROM_0_32)

ROWS = (
    Fit(releases=("0.28.0",), seams=_0_28),
    Fit(releases=("0.30.0",), seams=_0_30),
    Fit(releases=("0.32.0rc1",), preview=True, seams=_0_32),
)
