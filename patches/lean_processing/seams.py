"""The slots of ``lean_processing`` and the bodies it relies on: the newest release's, then what older ones change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
COMPANIONS = "vllm_omni.engine.cfg_companion_tracker"
METRICS = "vllm_omni.metrics.utils"
CORE_CLIENT = "vllm.v1.engine.core_client"

_RAW = ("self", "stage_id", "replica_id", "raw_outputs", "raw_terminal_request_ids")
_ROUTED = ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics")
_ENTRIES = ("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats")
_STEP = ("self", "req_state", "engine_core_output", "engine_core_timestamp", "iteration_stats")
_ENDED = ("self", "req_state", "finish_reason", "iteration_stats")
_MADE = ("self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params")
_COMPLETION = ("self", "token_ids", "finish_reason", "stop_reason")
_REQUEST = ("self", "external_req_id", "outputs", "finished", "kv_transfer_params", "ec_transfer_params")
_UPDATE = ("self", "new_token_ids", "stop_terminated")


def _pin(module: str, qualname: str, parameters: tuple[str, ...], body: str) -> Pin:
    return Pin(module, qualname, parameters, fingerprints=(body,))


NEWEST: tuple[AnySeam, ...] = (
    # A client's reader awaits recv_multipart of its socket; the socket is closed, and the task cancelled, at once.
    Wrap(
        CORE_CLIENT,
        "AsyncMPClient._ensure_output_queue_task",
        ("self",),
        wrapper="wrapped_ensure_output_queue_task",
        fingerprints=("b8acc61cdfb9da48",),
    ),
    _pin(CORE_CLIENT, "BackgroundResources.__call__", ("self",), "00c66677da8f495c"),
    # Who receives an output, and what is done with one that nothing receives.
    Wrap(
        ORCHESTRATOR,
        "OrchestratorBase._process_llm_stage_outputs",
        _RAW,
        wrapper="wrapped_process_llm_stage_outputs",
    ),
    _pin(
        ORCHESTRATOR,
        "OrchestratorBase._handle_processed_outputs",
        ("self", "stage_id", "replica_id", "outputs"),
        "bddfa47209930d59",
    ),
    _pin(ORCHESTRATOR, "OrchestratorBase._route_output", _ROUTED, "8b69561b20eb72c0"),
    _pin(ORCHESTRATOR, "OrchestratorBase._intercept_stage_output", (*_ROUTED, "submit_ts"), "c1862dcc7c6d1927"),
    Call(ORCHESTRATOR, "OrchestratorBase._stage_receives_async_chunks", ("self", "stage_id")),
    Call(COMPANIONS, "CfgCompanionTracker.is_companion", ("self", "req_id")),
    Call(COMPANIONS, "CfgCompanionTracker.has_companions", ("self", "parent_id")),
    # What is done with an entry besides making an output.
    Wrap(
        OMNI_PROCESSOR,
        "MultimodalOutputProcessor.process_outputs",
        _ENTRIES,
        wrapper="wrapped_process_outputs",
        fingerprints=("7c2fed9cd73797cb",),
    ),
    _pin(PROCESSOR, "OutputProcessor.process_outputs", (*_ENTRIES, "weight_version"), "3b7d56ab321ce82a"),
    _pin(DETOKENIZER, "IncrementalDetokenizer.update", _UPDATE, "96beb7fc2aafbfee"),
    # The records of latencies: what appends to one, reads it and takes it out.
    _pin(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_output", _STEP, "6f7260da3fcc6051"),
    _pin(OMNI_PROCESSOR, "MultimodalOutputProcessor._update_stats_from_finished", _ENDED, "3e80aecf03d3a7aa"),
    _pin(
        OMNI_PROCESSOR,
        "MultimodalOutputProcessor.pop_native_text_metrics",
        ("self", "request_id"),
        "ddce54807421326e",
    ),
    # What making an output changes, and of what it takes the token ids.
    _pin(
        OMNI_PROCESSOR,
        "OmniRequestState.make_request_output",
        (*_MADE, "ec_transfer_params", "routed_experts", "error"),
        "9ea14f560e4d7328",
    ),
    _pin(
        OMNI_PROCESSOR,
        "OmniRequestState._new_completion_output",
        (*_COMPLETION, "routed_experts"),
        "b32b4accb18ff561",
    ),
    _pin(PROCESSOR, "RequestState._new_completion_output", _COMPLETION, "73e90a3e34c850b0"),
    _pin(PROCESSOR, "RequestState._new_request_output", (*_REQUEST, "error"), "a33bb7f48e19fb81"),
    _pin(DETOKENIZER, "BaseIncrementalDetokenizer.update", _UPDATE, "10835bda5057e691"),
    _pin(DETOKENIZER, "SlowIncrementalDetokenizer.num_output_tokens", ("self",), "4e0d7a4b068bf3b3"),
    Call(DETOKENIZER, "IncrementalDetokenizer.num_output_tokens", ("self",)),
    # What makes an output of plain tokens here.
    Call(DETOKENIZER, "IncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
    Call(DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
    _pin(OMNI_PROCESSOR, "OmniRequestState._new_request_output", (*_REQUEST, "error"), "24c7a2a4020ac708"),
    # What is recorded of an output.
    Wrap(
        STAGE_POOL,
        "StagePool.record_output_timestamps",
        ("self", "request_outputs", "output_ts"),
        wrapper="wrapped_record_output_timestamps",
        fingerprints=("9915e787c51d9b6e",),
    ),
    _pin(
        STAGE_POOL,
        "StagePool._collect_audio_metrics",
        ("self", "request_outputs", "use_default_sample_rate"),
        "5d89efbcf4168904",
    ),
    _pin(METRICS, "count_audio_frames", ("mm_out",), "bd19e166c21e9424"),
    _pin(METRICS, "iter_mm_outputs", ("mm_source",), "2cf3f40e7942d33d"),
)


def _counted(accumulate: str) -> tuple[AnySeam, ...]:
    """The bodies whose work is done here for a step in the middle of a request; on 0.28 upstream does it."""
    given = ("self", "output", "engine_core_timestamp", "is_prefilling", "req_stats", "lora_states", "lora_name")
    return (
        _pin("vllm.v1.metrics.stats", "IterationStats.update_from_output", given, "5ab3a58a322319bf"),
        _pin(
            OMNI_PROCESSOR,
            "MultimodalOutputProcessor._native_text_metric_record",
            ("self", "request_id"),
            "4fffefeb423c808d",
        ),
        _pin(OMNI_PROCESSOR, "_accumulate_segment_tpot", ("record", "elapsed_ms", "new_tokens"), accumulate),
    )


Changes = Mapping[str, Mapping[str, Any]]
"""Attributes of seams that are others on a release, by the seam's ``qualname``."""


def _body(fingerprint: str, **more: Any) -> dict[str, Any]:
    return {"fingerprints": (fingerprint,), **more}


_0_30: Changes = {
    "BackgroundResources.__call__": _body("c80eb9132bcf8b7d"),
    "OrchestratorBase._handle_processed_outputs": _body("f234f27811caac26"),
    "MultimodalOutputProcessor.process_outputs": _body("54165b042df69240"),
    "OutputProcessor.process_outputs": _body("348d55341c5feec9", parameters=_ENTRIES),
    "MultimodalOutputProcessor._update_stats_from_output": _body("b6343d906ca6ae46"),
    "MultimodalOutputProcessor._update_stats_from_finished": _body("6ad4e0b357d2fe39"),
    "OmniRequestState.make_request_output": _body(
        "1af5b0e127fdbda0", parameters=(*_MADE, "ec_transfer_params", "routed_experts")
    ),
    "RequestState._new_completion_output": _body("c40ee94fe55a4f30"),
    "RequestState._new_request_output": _body("d4622dec0cec2f21", parameters=_REQUEST),
    "OmniRequestState._new_request_output": _body("3be6ab45bf73c9fe", parameters=_REQUEST),
    "BaseIncrementalDetokenizer.update": _body("3f983b6ac2b1e6b8"),
    "StagePool.record_output_timestamps": _body("59f7f6837fafb4eb"),
}

_0_28: Changes = {
    **_0_30,
    "OrchestratorBase._process_llm_stage_outputs": {"qualname": "Orchestrator._process_llm_stage_outputs"},
    "OrchestratorBase._handle_processed_outputs": _body(
        "f234f27811caac26", qualname="Orchestrator._handle_processed_outputs"
    ),
    "OrchestratorBase._route_output": _body("0b0bcf6cb7d2ef22", qualname="Orchestrator._route_output"),
    "OrchestratorBase._intercept_stage_output": _body(
        "c79aeeeb766e39b6",
        qualname="Orchestrator._duplex_output_decision",
        parameters=("self", "stage_id", "output", "req_state"),
    ),
    "OrchestratorBase._stage_receives_async_chunks": {"qualname": "Orchestrator._stage_receives_async_chunks"},
    "MultimodalOutputProcessor.process_outputs": _body("79091f079b074283"),
    "OutputProcessor.process_outputs": _body("969781d95639619f", parameters=_ENTRIES),
    "MultimodalOutputProcessor._update_stats_from_output": _body("b784af0ad1b97af3"),
    "MultimodalOutputProcessor._update_stats_from_finished": _body("c3e70244fba9a382"),
    "MultimodalOutputProcessor.pop_native_text_metrics": _body("4b1138fb06f1ca6f"),
    "RequestState._new_completion_output": _body("5a275c0fee74198e"),
}


def _with(changes: Changes) -> tuple[AnySeam, ...]:
    return tuple(replace(seam, **changes.get(seam.qualname, {})) for seam in NEWEST)


ROWS = (
    Fit(releases=("0.28.0",), seams=_with(_0_28)),
    Fit(releases=("0.30.0",), seams=(*_with(_0_30), *_counted("bbc0c1a866bb0b81"))),
    Fit(releases=("0.32.0rc1",), preview=True, seams=(*NEWEST, *_counted("728d0a53551fb4d1"))),
)
