"""The functions that ``lean_processing`` replaces and relies on, on the newest releases and on 0.28."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Fit, Relies, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
COMPANIONS = "vllm_omni.engine.cfg_companion_tracker"


def _seams(orchestrator: str, intercept: str) -> tuple[AnySeam, ...]:
    """The seams on every release.

    Args:
        orchestrator: The orchestrator's class.
        intercept: The method that it calls for an output before routing it.
    """
    return (
        # Which outputs are received, and how others are handled.
        Wrap(ORCHESTRATOR, f"{orchestrator}.__init__", wrapper="wrapped_orchestrator_made"),
        Relies(ORCHESTRATOR, f"{orchestrator}._handle_processed_outputs"),
        Relies(ORCHESTRATOR, f"{orchestrator}._route_output"),
        Relies(ORCHESTRATOR, f"{orchestrator}.{intercept}"),
        Relies(ORCHESTRATOR, f"{orchestrator}._stage_receives_async_chunks"),
        Relies(COMPANIONS, "CfgCompanionTracker.is_companion"),
        Relies(COMPANIONS, "CfgCompanionTracker.has_companions"),
        # How an entry is handled, apart from making an output.
        Wrap(
            OMNI_PROCESSOR,
            "MultimodalOutputProcessor.process_outputs",
            wrapper="wrapped_process_outputs",
        ),
        Relies(PROCESSOR, "OutputProcessor.process_outputs"),
        Relies(DETOKENIZER, "IncrementalDetokenizer.update"),
        # The functions that append to a record of latencies, read it and remove it.
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_output"),
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_finished"),
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor.pop_native_text_metrics"),
        # The state that changes when an output is made, and the source of its token ids.
        Relies(OMNI_PROCESSOR, "OmniRequestState.make_request_output"),
        Relies(OMNI_PROCESSOR, "OmniRequestState._new_completion_output"),
        Relies(PROCESSOR, "RequestState._new_completion_output"),
        Relies(PROCESSOR, "RequestState._new_request_output"),
        Relies(DETOKENIZER, "BaseIncrementalDetokenizer.update"),
        Relies(DETOKENIZER, "SlowIncrementalDetokenizer.num_output_tokens"),
        Relies(DETOKENIZER, "IncrementalDetokenizer.num_output_tokens"),
        # The functions with which the patch makes an output of plain tokens.
        Relies(DETOKENIZER, "IncrementalDetokenizer.get_next_output_text"),
        Relies(DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text"),
        Relies(OMNI_PROCESSOR, "OmniRequestState._new_request_output"),
        Relies(ORCHESTRATOR, orchestrator),
        Relies(ORCHESTRATOR, "OrchestratorRequestState"),
        Relies(STAGE_POOL, "StagePool"),
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor"),
        Relies(OMNI_PROCESSOR, "OmniRequestState"),
        Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
    )


_FROM_0_30: tuple[AnySeam, ...] = (
    *_seams("OrchestratorBase", "_intercept_stage_output"),
    Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
    # The bodies whose work the patch does for a step in the middle of a request. On 0.28 upstream does it.
    Relies("vllm.v1.metrics.stats", "IterationStats.update_from_output"),
    Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor._native_text_metric_record"),
    Relies(OMNI_PROCESSOR, "_accumulate_segment_tpot"),
)

ROWS = (
    Fit(releases=("0.28.0",), seams=_seams("Orchestrator", "_duplex_output_decision")),
    Fit(releases=("0.30.0",), seams=_FROM_0_30),
    Fit(releases=("0.32.0rc1",), preview=True, seams=_FROM_0_30),
)
