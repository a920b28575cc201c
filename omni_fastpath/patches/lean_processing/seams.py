"""The functions that ``lean_processing`` replaces and relies on, on the newest releases and on 0.28."""

from __future__ import annotations

from collections.abc import Iterator

from omni_fastpath.declare import AnySeam, Fit, Relies, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
COMPANIONS = "vllm_omni.engine.cfg_companion_tracker"


def _methods(module: str, owner: str, names: str) -> Iterator[Relies]:
    return (Relies(module, f"{owner}.{name}") for name in names.split())


def _seams(owner: str, intercept: str) -> tuple[AnySeam, ...]:
    """The seams on every release.

    Args:
        owner: The orchestrator's class.
        intercept: The method that it calls for an output before routing it.
    """
    stats = "_update_stats_from_output _update_stats_from_finished pop_native_text_metrics"
    states = "make_request_output _new_completion_output _new_request_output"
    return (
        # Which outputs are received, and how others are handled.
        Wrap(ORCHESTRATOR, f"{owner}.__init__", wrapper="wrapped_orchestrator_made"),
        Relies(ORCHESTRATOR, owner),
        Relies(ORCHESTRATOR, "OrchestratorRequestState"),
        *_methods(ORCHESTRATOR, owner, f"_handle_processed_outputs _route_output {intercept}"),
        *_methods(ORCHESTRATOR, owner, "_stage_receives_async_chunks"),
        *_methods(COMPANIONS, "CfgCompanionTracker", "is_companion has_companions"),
        Relies(STAGE_POOL, "StagePool"),
        # How an entry is handled, apart from making an output, and where a record of latencies grows and ends.
        Wrap(OMNI_PROCESSOR, "MultimodalOutputProcessor.process_outputs", wrapper="wrapped_process_outputs"),
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor"),
        *_methods(OMNI_PROCESSOR, "MultimodalOutputProcessor", stats),
        Relies(PROCESSOR, "OutputProcessor.process_outputs"),
        Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
        # How an output is made, the state that changes then, and the source of its token ids and of its text.
        Relies(OMNI_PROCESSOR, "OmniRequestState"),
        *_methods(OMNI_PROCESSOR, "OmniRequestState", states),
        *_methods(PROCESSOR, "RequestState", "_new_completion_output _new_request_output"),
        *_methods(DETOKENIZER, "IncrementalDetokenizer", "update num_output_tokens get_next_output_text"),
        *_methods(DETOKENIZER, "BaseIncrementalDetokenizer", "update get_next_output_text"),
        *_methods(DETOKENIZER, "SlowIncrementalDetokenizer", "num_output_tokens"),
    )


_FROM_0_30 = (
    *_seams("OrchestratorBase", "_intercept_stage_output"),
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
