"""What ``lean_processing`` takes hold of on each release, and which bodies it relies on."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Replace, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
LOGPROBS = "vllm.v1.engine.logprobs"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
CFG_TRACKER = "vllm_omni.engine.cfg_companion_tracker"
METRICS = "vllm_omni.metrics.utils"

_COMPLETION = ("self", "token_ids", "finish_reason", "stop_reason")
_REQUEST = ("self", "external_req_id", "outputs", "finished", "kv_transfer_params")
_ENTRIES = ("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats")
_ROUTED = ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics")


def _pin(module: str, name: str, parameters: tuple[str, ...], *bodies: str) -> Pin:
    body, *others = bodies
    return Pin(module, name, parameters, fingerprints=(body, *others))


_UPDATE = ("self", "new_token_ids", "stop_terminated")

_DETOKENIZER: tuple[AnySeam, ...] = (
    _pin(DETOKENIZER, "IncrementalDetokenizer.update", _UPDATE, "96beb7fc2aafbfee"),
    _pin(DETOKENIZER, "SlowIncrementalDetokenizer.num_output_tokens", ("self",), "4e0d7a4b068bf3b3"),
    Call(DETOKENIZER, "IncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
    Call(DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
    Call(DETOKENIZER, "IncrementalDetokenizer.num_output_tokens", ("self",)),
)
"""The same on every release."""

_EVERYWHERE: tuple[AnySeam, ...] = (
    _pin(
        OMNI_PROCESSOR, "OmniRequestState._new_completion_output", (*_COMPLETION, "routed_experts"), "b32b4accb18ff561"
    ),
    _pin("vllm_omni.data_entry_keys", "unflatten_payload", ("flat",), "6d43318428ac551f"),
    # What is recorded of an output.
    _pin(
        STAGE_POOL,
        "StagePool._collect_audio_metrics",
        ("self", "request_outputs", "use_default_sample_rate"),
        "5d89efbcf4168904",
    ),
    _pin(METRICS, "count_audio_frames", ("mm_out",), "bd19e166c21e9424"),
    _pin(METRICS, "iter_mm_outputs", ("mm_source",), "2cf3f40e7942d33d"),
    _pin(
        STAGE_POOL,
        "StagePool.process_llm_raw_outputs",
        ("self", "replica_id", "raw_outputs", "iteration_stats"),
        "9f913869029c3ca4",
    ),
    # What making an output calls besides, by upstream's names.
    *_DETOKENIZER,
    Call(LOGPROBS, "LogprobsProcessor.pop_prompt_logprobs", ("self",)),
    Call(CFG_TRACKER, "CfgCompanionTracker.has_companions", ("self", "parent_id")),
    Call(CFG_TRACKER, "CfgCompanionTracker.is_companion", ("self", "req_id")),
    Call(STAGE_POOL, "StagePool._has_non_empty_output", ("self", "request_output")),
    Call("vllm_omni.outputs.multimodal_accumulation", "drain_delta_payload", ("payload",)),
    Call(OMNI_PROCESSOR, "OmniRequestState._consolidate_multimodal_tensors", ("self",)),
    Call(OMNI_PROCESSOR, "_modality_to_type_string", ("modality",)),
)


def _admission(add_request: str, module: str = OMNI_PROCESSOR) -> Wrap:
    return Wrap(
        module,
        "MultimodalOutputProcessor.add_request",
        ("self", "request", "prompt", "parent_req", "request_index", "queue"),
        wrapper="wrapped_add_request",
        fingerprints=(add_request,),
    )


def _time_stamps(record: str, *, rate: str) -> tuple[AnySeam, ...]:
    return (
        Replace(
            STAGE_POOL,
            "StagePool.record_output_timestamps",
            ("self", "request_outputs", "output_ts"),
            wrapper="wrapped_record_output_timestamps",
            fingerprints=(record,),
        ),
        _pin(STAGE_POOL, "StagePool._infer_audio_sample_rate", ("self", "mm_output", "use_default"), rate),
    )


def _records(
    *, update: str, finished: str, pop: str, made: str = "4fffefeb423c808d", module: str = OMNI_PROCESSOR
) -> tuple[AnySeam, ...]:
    """The records of latencies: who makes, appends to, reads and forgets them."""
    owner, one = "MultimodalOutputProcessor", ("self", "request_id")
    stepped = ("self", "req_state", "engine_core_output", "engine_core_timestamp", "iteration_stats")
    ended = ("self", "req_state", "finish_reason", "iteration_stats")
    return (
        _pin(module, f"{owner}._native_text_metric_record", one, made),
        _pin(module, f"{owner}._update_stats_from_output", stepped, update),
        _pin(module, f"{owner}._update_stats_from_finished", ended, finished),
        _pin(module, f"{owner}.pop_native_text_metrics", one, pop),
    )


def _segments(accumulate: str) -> tuple[AnySeam, ...]:
    """From 0.30 on we count a step ourselves."""
    return (
        _pin(OMNI_PROCESSOR, "_accumulate_segment_tpot", ("record", "elapsed_ms", "new_tokens"), accumulate),
        _pin(
            "vllm.v1.metrics.stats",
            "IterationStats.update_from_output",
            ("self", "output", "engine_core_timestamp", "is_prefilling", "req_stats", "lora_states", "lora_name"),
            "5ab3a58a322319bf",
        ),
    )


def _processing(
    *, omnis: str, accumulate: str, vllms: str, text: str, told: tuple[str, ...] = ()
) -> tuple[AnySeam, ...]:
    """What goes past upstream's processing, and what that would have done with it."""
    return (
        _pin(OMNI_PROCESSOR, "MultimodalOutputProcessor.process_outputs", _ENTRIES, omnis),
        _pin(OMNI_PROCESSOR, "OmniRequestState.add_multimodal_tensor", ("self", "payload", "mm_type"), accumulate),
        _pin(PROCESSOR, "OutputProcessor.process_outputs", (*_ENTRIES, *told), vllms),
        _pin(DETOKENIZER, "BaseIncrementalDetokenizer.update", _UPDATE, text),
    )


def _making(
    *, output: str, completion: str, omnis: str, vllms: str, told: tuple[str, ...], asked: tuple[str, ...]
) -> tuple[AnySeam, ...]:
    """What making an output does besides, and of what it takes the token ids.

    Args:
        output: Body of ``make_request_output``.
        completion: Body of vLLM's ``_new_completion_output``.
        omnis: Body of vLLM-Omni's ``_new_request_output``.
        vllms: Body of vLLM's.
        told: What both of those are given on that release besides.
        asked: What ``make_request_output`` is given besides.
    """
    given = ("self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason", "kv_transfer_params")
    of_vllms = told or ("ec_transfer_params",)
    return (
        _pin(OMNI_PROCESSOR, "OmniRequestState.make_request_output", (*given, *asked), output),
        _pin(OMNI_PROCESSOR, "OmniRequestState._new_request_output", (*_REQUEST, *told), omnis),
        _pin(PROCESSOR, "RequestState._new_completion_output", _COMPLETION, completion),
        _pin(PROCESSOR, "RequestState._new_request_output", (*_REQUEST, *of_vllms), vllms),
    )


def _orchestrator(owner: str, *, handle: str, route: str) -> tuple[AnySeam, ...]:
    """What is asked of an output on its way through the orchestrator."""
    return (
        _pin(
            ORCHESTRATOR,
            f"{owner}._handle_processed_outputs",
            ("self", "stage_id", "replica_id", "outputs"),
            handle,
        ),
        _pin(ORCHESTRATOR, f"{owner}._route_output", _ROUTED, route),
        Call(ORCHESTRATOR, f"{owner}._stage_receives_async_chunks", ("self", "stage_id")),
    )


def _processed(owner: str) -> Wrap:
    return Wrap(
        ORCHESTRATOR,
        f"{owner}._process_llm_stage_outputs",
        ("self", "stage_id", "replica_id", "raw_outputs", "raw_terminal_request_ids"),
        wrapper="wrapped_process_llm_stage_outputs",
    )


_BEFORE_PROCESSING = Wrap(
    ORCHESTRATOR,
    "Orchestrator._handle_kv_ready_raw_outputs",
    ("self", "stage_id", "raw_outputs"),
    wrapper="wrapped_process_llm_stage_outputs",
)
"""Up to 0.26 processing stands in upstream's loop, which calls this right before."""

_DUPLEX_PLANE = _pin(
    ORCHESTRATOR,
    "Orchestrator._duplex_output_decision",
    ("self", "stage_id", "output", "req_state"),
    "c79aeeeb766e39b6",
)
"""Up to 0.28 a duplex plane looks at every output; without one nobody does."""

_INTERCEPTION = _pin(
    ORCHESTRATOR,
    "OrchestratorBase._intercept_stage_output",
    ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics", "submit_ts"),
    "c1862dcc7c6d1927",
)
"""From 0.30 on a duplex orchestrator is a subclass, which looks at every output here."""

_BEFORE_0_26 = "vllm_omni.engine.output_processor"


def _first_half(completion: str, *more: str) -> tuple[AnySeam, ...]:
    """Up to 0.24: latencies and copies of token ids, whose code is the same; what makes an output is another.

    Args:
        completion: Body of vLLM-Omni's ``_new_completion_output``.
        more: What it is given besides.
    """
    return (
        _admission("1ea161a4a9453987", _BEFORE_0_26),
        *_records(
            update="034793ea80f8edf1",
            finished="c3e70244fba9a382",
            pop="4b1138fb06f1ca6f",
            made="77d14c094c25e781",
            module=_BEFORE_0_26,
        ),
        _pin(_BEFORE_0_26, "OmniRequestState._new_completion_output", (*_COMPLETION, *more), completion),
        _pin(PROCESSOR, "RequestState._new_completion_output", _COMPLETION, "a34f551db1b6828c"),
        _pin(DETOKENIZER, "BaseIncrementalDetokenizer.update", _UPDATE, "3f983b6ac2b1e6b8"),
        *_DETOKENIZER,
    )


_FIRST_HALF = "latencies and copies of token ids; what nobody sees is built"
_STEPS_ARE_UPSTREAMS = "a step's statistics are upstream's own"

_UP_TO_0_28: tuple[AnySeam, ...] = (
    _admission("1ea161a4a9453987"),
    *_time_stamps("59f7f6837fafb4eb", rate="51012716474c7fe9"),
    *_records(update="b784af0ad1b97af3", finished="c3e70244fba9a382", pop="4b1138fb06f1ca6f"),
    _DUPLEX_PLANE,
    *_EVERYWHERE,
)

ROWS = (
    Fit(releases=("0.22.0",), note=_FIRST_HALF, seams=_first_half("7d8c4d7618c5e31c")),
    Fit(releases=("0.24.0",), note=_FIRST_HALF, seams=_first_half("dd65b881cee077e7", "routed_experts")),
    Fit(
        releases=("0.26.0",),
        note=_STEPS_ARE_UPSTREAMS,
        seams=(
            _BEFORE_PROCESSING,
            *_processing(
                omnis="79091f079b074283",
                accumulate="18f9b2798b344ce0",
                vllms="1a96a00d5ebc59a3",
                text="3f983b6ac2b1e6b8",
            ),
            *_making(
                output="1b6d965069f925ee",
                completion="a34f551db1b6828c",
                omnis="75b60ebc6a4d4c9d",
                vllms="d4622dec0cec2f21",
                told=(),
                asked=("routed_experts",),
            ),
            *_orchestrator("Orchestrator", handle="9499538cff27bd7a", route="8839d55180dd1380"),
            *_UP_TO_0_28,
        ),
    ),
    Fit(
        releases=("0.28.0",),
        note=_STEPS_ARE_UPSTREAMS,
        seams=(
            _processed("Orchestrator"),
            *_processing(
                omnis="79091f079b074283",
                accumulate="18f9b2798b344ce0",
                vllms="969781d95639619f",
                text="3f983b6ac2b1e6b8",
            ),
            *_making(
                output="1af5b0e127fdbda0",
                completion="5a275c0fee74198e",
                omnis="3be6ab45bf73c9fe",
                vllms="d4622dec0cec2f21",
                told=("ec_transfer_params",),
                asked=("ec_transfer_params", "routed_experts"),
            ),
            *_orchestrator("Orchestrator", handle="f234f27811caac26", route="0b0bcf6cb7d2ef22"),
            *_UP_TO_0_28,
        ),
    ),
    Fit(
        releases=("0.30.0",),
        seams=(
            _admission("1ea161a4a9453987"),
            *_time_stamps("59f7f6837fafb4eb", rate="51012716474c7fe9"),
            _processed("OrchestratorBase"),
            *_records(update="b6343d906ca6ae46", finished="6ad4e0b357d2fe39", pop="ddce54807421326e"),
            *_segments("bbc0c1a866bb0b81"),
            *_processing(
                omnis="54165b042df69240",
                accumulate="18f9b2798b344ce0",
                vllms="348d55341c5feec9",
                text="3f983b6ac2b1e6b8",
            ),
            *_making(
                output="1af5b0e127fdbda0",
                completion="c40ee94fe55a4f30",
                omnis="3be6ab45bf73c9fe",
                vllms="d4622dec0cec2f21",
                told=("ec_transfer_params",),
                asked=("ec_transfer_params", "routed_experts"),
            ),
            *_orchestrator("OrchestratorBase", handle="f234f27811caac26", route="8b69561b20eb72c0"),
            _INTERCEPTION,
            *_EVERYWHERE,
        ),
    ),
    Fit(
        releases=("0.32.0rc1",),
        preview=True,
        seams=(
            _admission("dfc9aabf0bc97fb5"),
            *_time_stamps("9915e787c51d9b6e", rate="2d7cf100249ff506"),
            _processed("OrchestratorBase"),
            *_records(update="6f7260da3fcc6051", finished="3e80aecf03d3a7aa", pop="ddce54807421326e"),
            *_segments("728d0a53551fb4d1"),
            *_processing(
                omnis="7c2fed9cd73797cb",
                accumulate="749fc66dd2da7892",
                vllms="3b7d56ab321ce82a",
                text="10835bda5057e691",
                told=("weight_version",),
            ),
            *_making(
                output="9ea14f560e4d7328",
                completion="73e90a3e34c850b0",
                omnis="24c7a2a4020ac708",
                vllms="a33bb7f48e19fb81",
                told=("ec_transfer_params", "error"),
                asked=("ec_transfer_params", "routed_experts", "error"),
            ),
            *_orchestrator("OrchestratorBase", handle="bddfa47209930d59", route="8b69561b20eb72c0"),
            _INTERCEPTION,
            Call(LOGPROBS, "LogprobsProcessor.pop_prompt_token_id_logprobs", ("self",)),
            *_EVERYWHERE,
        ),
    ),
)
