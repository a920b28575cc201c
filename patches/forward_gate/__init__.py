"""What a stage sends to the next one through the connector is not sent to the orchestrator as well.

What:
    Under async-chunk a middle AR stage (Qwen3-Omni's talker) hands its payload to the next
    stage through the connector, and its scheduler puts the same payload into the outputs for the orchestrator. With the
    patch those outputs leave the stage with the part that clients may see (the roots ``model_outputs``, ``audio``,
    ``sr``, ``image``... and the marks of a spoken turn; upstream's ``partition_flat_payload`` says which) and without
    the rest. Whether there is an output, its tokens, finish reason and statistics stay as they were. What remains of a
    payload with nothing to see is None, as upstream's own split leaves it: an output processor takes None and an empty
    payload alike, and on the wire both are one byte.
Why:
    The orchestrator decodes the payload, keeps every step's, copies them into each output and joins them at the
    request's end, on the thread that routes all audio, and nothing reads the result. Upstream (model runner v1) splits
    the payload only of a stage that its connector calls a sender: a middle stage has the connector of its incoming
    edge, is called a receiver, and sends everything twice.
Why not a hook:
    Upstream has none between the model runner's output and the scheduler's.
Scope:
    Main thread of a stage process whose scheduler is an ``OmniARScheduler``. Judged once, when the scheduler is made;
    the state's reason says what was found. ``superseded`` where upstream splits the payload itself.
    ``not_applicable``: generation stages, no async-chunk, model runner v2, final-output stages, stages that make audio,
    images or video, duplex deployments, KV transfer (PD prefill), and stages whose payload the orchestrator may have to
    hand on: stage 0 without a connector, and stages without a processor for chunks. A stage process does not know its
    next stage. That one receives chunks follows from the processor: from 0.30 on upstream refuses to start where the
    two ends of an edge whose producer has a processor for chunks differ in async-chunk; on 0.28 it asks the next
    stage's connector alone. Such a processor is known by its parameters, a step's payload and ``is_finished``; one for
    whole payloads lacks the first or both. On 0.28 a stage process does not know whether its stage is a final-output
    one: clients get what the roots say, as they do by upstream's own split of a thinker.
    Left alone request by request: pooling requests, streaming sessions in all their segments, CFG companions. Left
    alone step by step: an output whose payload list is not the very list that goes to the connector, as when the model
    names the keys that its clients get (``omni_client_multimodal_output_keys``).
Fragility:
    Wraps ``OmniARScheduler.update_from_output`` and works on what it returned; the payload itself, which the
    connector's save task holds, is never changed. The body is pinned, because what it hands to the connector and what
    to the outputs is relied on; so is the check of the edges. Not seen: a middle stage of four or more with a processor
    for chunks and no connector on its outgoing edge, while the stage after it has one of its own going out. Upstream
    hands on through the orchestrator there, and leaves the stage's chunks in shared memory; no pipeline of 0.30 is like
    that.
    Companions have ``__cfg_`` in one of their two ids. A step's ``multimodal_outputs`` and ``inter_stage_outputs`` are
    compared by identity. Set: ``multimodal_output`` of an output.
Upstream thread:
    vllm-omni issue #4469, PR #3690.
Remove when:
    Upstream's runner splits the payload of every stage that sends chunks, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Pin, Process, Reads, Wrap

AR_SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
CONNECTORS = "vllm_omni.distributed.omni_connectors.utils.config"


SEAMS: tuple[AnySeam, ...] = (
    Wrap(AR_SCHEDULER, "OmniARScheduler.__init__", wrapper="wrapped_ar_init"),
    Wrap(AR_SCHEDULER, "OmniARScheduler.update_from_output", wrapper="wrapped_update_from_output", pinned=True),
    Wrap(
        "vllm_omni.core.sched.omni_generation_scheduler",
        "OmniGenerationScheduler.__init__",
        wrapper="wrapped_generation_init",
    ),
    # Upstream's own split, and which stages have it.
    Call("vllm_omni.utils.mm_outputs", "partition_flat_payload"),
    Pin(CONNECTORS, "stage_sends_async_output"),
    Call(CONNECTORS, "get_stage_connector_role"),
    Reads(AR_SCHEDULER, "OmniARScheduler", ("vllm_config", "requests", "chunk_transfer_adapter")),
    Reads(ADAPTER, "OmniChunkTransferAdapter", ("custom_process_next_stage_input_func",)),
    Reads(
        "vllm_omni.config.model",
        "OmniModelConfig",
        ("async_chunk", "worker_type", "engine_output_type", "session_mode", "stage_id", "model_stage"),
    ),
    Reads(
        "vllm_omni.request",
        "OmniRequest",
        ("request_id", "external_req_id", "pooling_params", "resumable", "streaming_queue"),
    ),
    Reads("vllm.v1.core.sched.output", "SchedulerOutput", ("num_scheduled_tokens",)),
    Reads("vllm_omni.outputs", "OmniModelRunnerOutput", ("multimodal_outputs", "inter_stage_outputs")),
    Reads("vllm_omni.engine", "OmniEngineCoreOutput", ("request_id", "multimodal_output")),
)

RECEIVES = Pin(CONNECTORS, "stage_receives_chunks")
"""By which the orchestrator hands on; it does not look at whether the next stage has async-chunk."""

FROM_0_30 = (
    Pin("vllm_omni.config.stage_config", "validate_stage_async_chunk_edges"),
    Reads("vllm_omni.config.model", "OmniModelConfig", ("use_v2_model_runner", "final_output")),
)

PATCH = Patch(
    name="forward_gate",
    summary="payloads that go to the next stage are not sent to the orchestrator as well",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    counters=(Counter("multimodal_outputs", "outputs whose multimodal_output was gated"),),
    rows=(
        Fit(releases=("0.28.0",), seams=(*SEAMS, RECEIVES)),
        Fit(releases=("0.30.0",), seams=(*SEAMS, *FROM_0_30)),
        Fit(releases=("0.32.0rc1",), preview=True, seams=(*SEAMS, *FROM_0_30)),
    ),
)
