"""The functions that ``lean_processing`` replaces and relies on, on the newest releases and on 0.28."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Reads, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
COMPANIONS = "vllm_omni.engine.cfg_companion_tracker"


_OWN = ("stage_pools", "request_states", "async_chunk", "num_stages", "_pd_pair", "_cfg_tracker")
_POOL = ("output_processor", "stage_client", "final_output", "_non_empty_first_output_timestamps_by_request")
_STATE = (
    *("external_req_id", "output_kind", "stream_interval", "parent_req", "queue", "streaming_input", "is_prefilling"),
    *("stats", "request_index", "logprobs_processor", "mm_accumulated", "detokenizer", "native_text_stats"),
)
_ENTRY = (
    *("request_id", "new_token_ids", "finish_reason", "stop_reason", "new_logprobs", "new_prompt_logprobs_tensors"),
    *("events", "kv_transfer_params", "pooling_output", "multimodal_output", "is_segment_finished"),
)


def _seams(orchestrator: str, intercept: str, session: str) -> tuple[AnySeam, ...]:
    """The seams on every release.

    Args:
        orchestrator: The orchestrator's class.
        intercept: The method that it calls for an output before routing it.
        session: The attribute of a request's state that names its session.
    """
    return (
        # Which outputs are received, and how others are handled.
        Wrap(ORCHESTRATOR, f"{orchestrator}.__init__", wrapper="wrapped_orchestrator_made"),
        Pin(ORCHESTRATOR, f"{orchestrator}._handle_processed_outputs"),
        Pin(ORCHESTRATOR, f"{orchestrator}._route_output"),
        Pin(ORCHESTRATOR, f"{orchestrator}.{intercept}"),
        Call(ORCHESTRATOR, f"{orchestrator}._stage_receives_async_chunks"),
        Call(COMPANIONS, "CfgCompanionTracker.is_companion"),
        Call(COMPANIONS, "CfgCompanionTracker.has_companions"),
        # How an entry is handled, apart from making an output.
        Wrap(
            OMNI_PROCESSOR,
            "MultimodalOutputProcessor.process_outputs",
            wrapper="wrapped_process_outputs",
            pinned=True,
        ),
        Pin(PROCESSOR, "OutputProcessor.process_outputs"),
        Pin(DETOKENIZER, "IncrementalDetokenizer.update"),
        # The functions that append to a record of latencies, read it and remove it.
        Pin(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_output"),
        Pin(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_finished"),
        Pin(OMNI_PROCESSOR, "MultimodalOutputProcessor.pop_native_text_metrics"),
        # The state that changes when an output is made, and the source of its token ids.
        Pin(OMNI_PROCESSOR, "OmniRequestState.make_request_output"),
        Pin(OMNI_PROCESSOR, "OmniRequestState._new_completion_output"),
        Pin(PROCESSOR, "RequestState._new_completion_output"),
        Pin(PROCESSOR, "RequestState._new_request_output"),
        Pin(DETOKENIZER, "BaseIncrementalDetokenizer.update"),
        Pin(DETOKENIZER, "SlowIncrementalDetokenizer.num_output_tokens"),
        Call(DETOKENIZER, "IncrementalDetokenizer.num_output_tokens"),
        # The functions with which the patch makes an output of plain tokens.
        Call(DETOKENIZER, "IncrementalDetokenizer.get_next_output_text"),
        Call(DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text"),
        Pin(OMNI_PROCESSOR, "OmniRequestState._new_request_output"),
        Reads(ORCHESTRATOR, orchestrator, _OWN),
        Reads(ORCHESTRATOR, "OrchestratorRequestState", ("streaming", session)),
        Reads(STAGE_POOL, "StagePool", _POOL),
        Reads(OMNI_PROCESSOR, "MultimodalOutputProcessor", ("request_states", "_native_text_metrics_by_request")),
        Reads(OMNI_PROCESSOR, "OmniRequestState", _STATE),
        Reads("vllm_omni.engine", "OmniEngineCoreOutput", _ENTRY),
    )


_FROM_0_30: tuple[AnySeam, ...] = (
    *_seams("OrchestratorBase", "_intercept_stage_output", "session_owned"),
    Reads("vllm_omni.engine", "OmniEngineCoreOutput", ("num_generation_tokens",)),
    # The bodies whose work the patch does for a step in the middle of a request. On 0.28 upstream does it.
    Pin("vllm.v1.metrics.stats", "IterationStats.update_from_output"),
    Pin(OMNI_PROCESSOR, "MultimodalOutputProcessor._native_text_metric_record"),
    Pin(OMNI_PROCESSOR, "_accumulate_segment_tpot"),
)

ROWS = (
    Fit(releases=("0.28.0",), seams=_seams("Orchestrator", "_duplex_output_decision", "duplex_identity")),
    Fit(releases=("0.30.0",), seams=_FROM_0_30),
    Fit(releases=("0.32.0rc1",), preview=True, seams=_FROM_0_30),
)
