"""What an output costs the orchestrator does not grow with its request, and what nobody sees is not built.

What:
    Inter-token latencies are added up when they are read, at a stage's end, and not at each output. A completion copies
    the token ids so far when somebody looks at them. Whether an output is a request's first with something in it is
    asked until one was; a sample rate is looked for where one can be found. In the middle of a request that nobody sees
    at a stage, no completion, no request output and no copies are made: a bare object with the request's id goes
    through upstream's routing, which does nothing with it but look whether it is an end. Statistics, time stamps, audio
    frames, text offsets, stop strings, prompt logprobs and the accumulated payload advance as they do on stock, and the
    terminal output is made by upstream from the same state.
Why:
    Upstream adds up all latencies of a request and copies all of its token ids at each output, so that a request of n
    steps costs n² (an output at step 2,000 up to five times one at step 50). An output of a talker, which nobody gets,
    costs as much as one of a thinker. All of it is under the interpreter's lock that the front end waits for.
Why not a hook:
    Upstream has none there. ``RequestOutputKind.FINAL_ONLY`` for the stages that nobody sees is no substitute: it
    changes which audio terminal counts as one, and drops the time stamps whose differences reach clients.
Scope:
    Orchestrator thread, every loop and mode. Requests added while the patch is on. Not built is what stands in the
    middle of a request (DELTA or CUMULATIVE, no session, no CFG companion, no pooling, stream interval 1) at a stage
    without final output whose next stage receives chunks, after its first output with something in it; not in a
    subclass of ``Orchestrator`` (duplex: its plugins look at every output), not with prefill and decode apart. A
    payload with audio or a sample rate in it is built as on stock, since statistics read it. What hooks see of an
    output that was not built has no completions. Values are upstream's to the last digit.
Fragility:
    Replaces ``record_output_timestamps``. Gives a request's state and a stage's processor a subclass, and its records
    a dict, of ours; counts a step in the middle of a request in words of its own; relies on who reads all these, and
    when. The bodies are pinned. The detokenizers' lists are relied on to grow at their end only; a detokenizer that is
    not known gets upstream's copies.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream keeps running sums, copies token ids for the terminal output alone, and drops outputs that nobody sees
    before they are built.
"""

from __future__ import annotations

from omni_fastpath.declare import Call, Counter, Fit, Patch, Pin, Process, Replace, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
STAGE_POOL = "vllm_omni.engine.stage_pool"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"
CFG_TRACKER = "vllm_omni.engine.cfg_companion_tracker"

_COMPLETION = ("self", "token_ids", "finish_reason", "stop_reason")
_REQUEST = ("self", "external_req_id", "outputs", "finished", "kv_transfer_params", "ec_transfer_params")


PATCH = Patch(
    name="lean_processing",
    summary="an output's cost does not grow with its request; what nobody sees is not built",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    default_on=False,
    counters=(
        Counter("requests", "requests of a stage whose outputs it makes cheaper"),
        Counter("not_built", "outputs in the middle of a request that nobody sees, which were not built"),
        Counter("copied", "completions of which somebody looked at all token ids, so that they were copied"),
    ),
    rows=(
        Fit(
            releases=("0.30.0",),
            seams=(
                Wrap(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor.add_request",
                    ("self", "request", "prompt", "parent_req", "request_index", "queue"),
                    wrapper="wrapped_add_request",
                    fingerprints=("1ea161a4a9453987",),
                ),
                Replace(
                    STAGE_POOL,
                    "StagePool.record_output_timestamps",
                    ("self", "request_outputs", "output_ts"),
                    wrapper="wrapped_record_output_timestamps",
                    fingerprints=("59f7f6837fafb4eb",),
                ),
                Wrap(
                    ORCHESTRATOR,
                    "OrchestratorBase._process_llm_stage_outputs",
                    ("self", "stage_id", "replica_id", "raw_outputs", "raw_terminal_request_ids"),
                    wrapper="wrapped_process_llm_stage_outputs",
                ),
                # The records of latencies: who makes, appends to, reads and forgets them.
                Pin(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor._update_stats_from_output",
                    ("self", "req_state", "engine_core_output", "engine_core_timestamp", "iteration_stats"),
                    fingerprints=("b6343d906ca6ae46",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor._update_stats_from_finished",
                    ("self", "req_state", "finish_reason", "iteration_stats"),
                    fingerprints=("6ad4e0b357d2fe39",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor._native_text_metric_record",
                    ("self", "request_id"),
                    fingerprints=("4fffefeb423c808d",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor.pop_native_text_metrics",
                    ("self", "request_id"),
                    fingerprints=("ddce54807421326e",),
                ),
                # What goes past upstream's processing, and what that would have done with it.
                Pin(
                    OMNI_PROCESSOR,
                    "MultimodalOutputProcessor.process_outputs",
                    ("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
                    fingerprints=("54165b042df69240",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "OmniRequestState.add_multimodal_tensor",
                    ("self", "payload", "mm_type"),
                    fingerprints=("18f9b2798b344ce0",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "_accumulate_segment_tpot",
                    ("record", "elapsed_ms", "new_tokens"),
                    fingerprints=("bbc0c1a866bb0b81",),
                ),
                Pin(
                    "vllm.v1.metrics.stats",
                    "IterationStats.update_from_output",
                    (
                        "self",
                        "output",
                        "engine_core_timestamp",
                        "is_prefilling",
                        "req_stats",
                        "lora_states",
                        "lora_name",
                    ),
                    fingerprints=("5ab3a58a322319bf",),
                ),
                # What making an output does besides, and of what it takes the token ids.
                Pin(
                    OMNI_PROCESSOR,
                    "OmniRequestState.make_request_output",
                    (
                        "self",
                        "new_token_ids",
                        "pooling_output",
                        "finish_reason",
                        "stop_reason",
                        "kv_transfer_params",
                        "ec_transfer_params",
                        "routed_experts",
                    ),
                    fingerprints=("1af5b0e127fdbda0",),
                ),
                Pin(
                    OMNI_PROCESSOR,
                    "OmniRequestState._new_completion_output",
                    (*_COMPLETION, "routed_experts"),
                    fingerprints=("b32b4accb18ff561",),
                ),
                Pin(
                    OMNI_PROCESSOR, "OmniRequestState._new_request_output", _REQUEST, fingerprints=("3be6ab45bf73c9fe",)
                ),
                Pin(PROCESSOR, "RequestState._new_completion_output", _COMPLETION, fingerprints=("c40ee94fe55a4f30",)),
                Pin(PROCESSOR, "RequestState._new_request_output", _REQUEST, fingerprints=("d4622dec0cec2f21",)),
                Pin(
                    PROCESSOR,
                    "OutputProcessor.process_outputs",
                    ("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
                    fingerprints=("348d55341c5feec9",),
                ),
                Pin(
                    DETOKENIZER,
                    "IncrementalDetokenizer.update",
                    ("self", "new_token_ids", "stop_terminated"),
                    fingerprints=("96beb7fc2aafbfee",),
                ),
                Pin(
                    DETOKENIZER,
                    "BaseIncrementalDetokenizer.update",
                    ("self", "new_token_ids", "stop_terminated"),
                    fingerprints=("3f983b6ac2b1e6b8",),
                ),
                Pin(
                    DETOKENIZER,
                    "SlowIncrementalDetokenizer.num_output_tokens",
                    ("self",),
                    fingerprints=("4e0d7a4b068bf3b3",),
                ),
                Pin("vllm_omni.data_entry_keys", "unflatten_payload", ("flat",), fingerprints=("6d43318428ac551f",)),
                # What is recorded of an output, and what is asked of one on its way through the orchestrator.
                Pin(
                    STAGE_POOL,
                    "StagePool._collect_audio_metrics",
                    ("self", "request_outputs", "use_default_sample_rate"),
                    fingerprints=("5d89efbcf4168904",),
                ),
                Pin(
                    STAGE_POOL,
                    "StagePool._infer_audio_sample_rate",
                    ("self", "mm_output", "use_default"),
                    fingerprints=("51012716474c7fe9",),
                ),
                Pin("vllm_omni.metrics.utils", "count_audio_frames", ("mm_out",), fingerprints=("bd19e166c21e9424",)),
                Pin("vllm_omni.metrics.utils", "iter_mm_outputs", ("mm_source",), fingerprints=("2cf3f40e7942d33d",)),
                Pin(
                    STAGE_POOL,
                    "StagePool.process_llm_raw_outputs",
                    ("self", "replica_id", "raw_outputs", "iteration_stats"),
                    fingerprints=("9f913869029c3ca4",),
                ),
                Pin(
                    ORCHESTRATOR,
                    "OrchestratorBase._handle_processed_outputs",
                    ("self", "stage_id", "replica_id", "outputs"),
                    fingerprints=("f234f27811caac26",),
                ),
                Pin(
                    ORCHESTRATOR,
                    "OrchestratorBase._route_output",
                    ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics"),
                    fingerprints=("8b69561b20eb72c0",),
                ),
                Pin(
                    ORCHESTRATOR,
                    "OrchestratorBase._intercept_stage_output",
                    ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics", "submit_ts"),
                    fingerprints=("c1862dcc7c6d1927",),
                ),
                # What making an output calls besides, by upstream's names.
                Call(DETOKENIZER, "IncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
                Call(DETOKENIZER, "BaseIncrementalDetokenizer.get_next_output_text", ("self", "finished", "delta")),
                Call(DETOKENIZER, "IncrementalDetokenizer.num_output_tokens", ("self",)),
                Call("vllm.v1.engine.logprobs", "LogprobsProcessor.pop_prompt_logprobs", ("self",)),
                Call(CFG_TRACKER, "CfgCompanionTracker.has_companions", ("self", "parent_id")),
                Call(CFG_TRACKER, "CfgCompanionTracker.is_companion", ("self", "req_id")),
                Call(ORCHESTRATOR, "OrchestratorBase._stage_receives_async_chunks", ("self", "stage_id")),
                Call(STAGE_POOL, "StagePool._has_non_empty_output", ("self", "request_output")),
                Call("vllm_omni.outputs.multimodal_accumulation", "drain_delta_payload", ("payload",)),
                Call(OMNI_PROCESSOR, "OmniRequestState._consolidate_multimodal_tensors", ("self",)),
                Call(OMNI_PROCESSOR, "_modality_to_type_string", ("modality",)),
            ),
        ),
    ),
)
