"""A stage does not send to the orchestrator what it sends to the next stage through the connector.

What:
    Under async-chunk a middle AR stage (Qwen3-Omni's talker) hands its payload to the next stage through the connector,
    and its scheduler puts the same payload into the outputs for the orchestrator. With the patch these outputs leave
    the stage only with the part that clients may receive (the roots ``model_outputs``, ``audio``, ``sr``, ``image``...
    and the marks of a spoken turn, as upstream's ``partition_flat_payload`` determines). Whether there is an output,
    its tokens, finish reason and statistics do not change. A payload without such a part becomes None, as in upstream's
    own split. An output processor treats None and an empty payload alike, and both are one byte on the wire.
Why:
    The orchestrator decodes the payload, keeps that of every step, copies all of them into each output and joins them
    at the request's end, on the thread that routes all audio, and nothing reads the result. Upstream (model runner v1)
    splits the payload only for a stage that its connector calls a sender. A middle stage has the connector of its
    incoming edge, is called a receiver, and sends everything twice.
Why not a hook:
    Upstream has none between the model runner's output and the scheduler's.
Scope:
    Main thread of a stage process whose scheduler is an ``OmniARScheduler``. The stage is judged once, when the
    scheduler is made, and the reason of the state gives the result. ``superseded`` if upstream splits the payload
    itself. ``not_applicable``: generation stages, no async-chunk, model runner v2, final-output stages, stages that
    make audio, images or video, duplex deployments, KV transfer (PD prefill), and stages whose payload the orchestrator
    may have to pass on, which are stage 0 without a connector and stages without a processor for chunks. A stage
    process does not know its next stage, but the processor implies that it receives chunks. From 0.30 on upstream
    refuses to start if the two ends of an edge whose producer has a processor for chunks differ in async-chunk. On 0.28
    it asks only the next stage's connector. A processor for chunks is recognized by its parameters, a step's payload
    and ``is_finished``. One for whole payloads lacks the first or both. On 0.28 a stage process does not know whether
    it is a final-output stage, so that clients get what the roots determine, as with upstream's own split of a thinker.
    Per request, pooling requests, streaming sessions in all their segments and CFG companions are left alone. Per step,
    so is an output whose payload list is not the very list that is sent to the connector, for example because the model
    names the keys that its clients get (``omni_client_multimodal_output_keys``).
Fragility:
    Wraps ``OmniARScheduler.update_from_output`` and works on its result. The payload itself, which the connector's save
    task has, is never changed. The body is pinned, because the patch relies on what it passes to the connector and to
    the outputs, and so is the check of the edges. Not recognized: a middle stage of four or more with a processor
    for chunks and no connector on its outgoing edge, if the stage after it has one on its own outgoing edge. Upstream
    passes the payload on through the orchestrator there, and leaves the stage's chunks in shared memory. No pipeline of
    0.30 is like that. Companions have ``__cfg_`` in one of their two ids. A step's ``multimodal_outputs`` and
    ``inter_stage_outputs`` are compared by identity. Set: ``multimodal_output`` of an output.
Upstream thread:
    vllm-omni issue #4469, PR #3690.
Remove when:
    Upstream's runner splits the payload of every stage that sends chunks, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Wrap

AR_SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
CONNECTORS = "vllm_omni.distributed.omni_connectors.utils.config"


SEAMS: tuple[AnySeam, ...] = (
    Wrap(AR_SCHEDULER, "OmniARScheduler.__init__", wrapper="wrapped_ar_init"),
    Wrap(AR_SCHEDULER, "OmniARScheduler.update_from_output", wrapper="wrapped_update_from_output"),
    Wrap(
        "vllm_omni.core.sched.omni_generation_scheduler",
        "OmniGenerationScheduler.__init__",
        wrapper="wrapped_generation_init",
    ),
    # Upstream's own split, and the stages that have it.
    Relies("vllm_omni.utils.mm_outputs", "partition_flat_payload"),
    Relies(CONNECTORS, "stage_sends_async_output"),
    Relies(CONNECTORS, "get_stage_connector_role"),
    Relies(AR_SCHEDULER, "OmniARScheduler"),
    Relies(ADAPTER, "OmniChunkTransferAdapter"),
    Relies("vllm_omni.config.model", "OmniModelConfig"),
    Relies("vllm_omni.request", "OmniRequest"),
    Relies("vllm.v1.core.sched.output", "SchedulerOutput"),
    Relies("vllm_omni.outputs", "OmniModelRunnerOutput"),
    Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
)

RECEIVES = Relies(CONNECTORS, "stage_receives_chunks")
"""Decides whether the orchestrator passes the payload on, without checking that the next stage has async-chunk."""

FROM_0_30 = (Relies("vllm_omni.config.stage_config", "validate_stage_async_chunk_edges"),)

PATCH = Patch(
    name="forward_gate",
    summary="payloads for the next stage are not sent to the orchestrator as well",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    counters=(Counter("multimodal_outputs", "outputs that left the stage without their payload"),),
    rows=(
        Fit(releases=("0.28.0",), seams=(*SEAMS, RECEIVES)),
        Fit(releases=("0.30.0",), seams=(*SEAMS, *FROM_0_30)),
        Fit(releases=("0.32.0rc1",), preview=True, seams=(*SEAMS, *FROM_0_30)),
    ),
)
