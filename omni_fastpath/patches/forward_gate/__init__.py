"""A stage does not send to the orchestrator what it sends to the next stage through the connector.

What:
    Under async-chunk a middle AR stage (Qwen3-Omni's talker) sends its payload to the next stage through the connector
    and, with its outputs, to the orchestrator. With the patch these outputs leave the stage only with the part that
    clients may receive (upstream's ``partition_flat_payload``), or with None. Whether there is an output, its tokens,
    finish reason and statistics do not change. An output processor treats None and an empty payload alike.
Why:
    The orchestrator decodes the payload of every step, copies all of them into each output and joins them at the end,
    on the thread that routes all audio, and nothing reads the result. Upstream's runner splits the payload only for a
    stage that its connector calls a sender, and a middle stage is called a receiver.
Why not a hook:
    Upstream has none between the model runner's output and the scheduler's.
Scope:
    Stages with an ``OmniARScheduler``, each judged when that is made. The reason of the state gives the result.
    Left alone: stages that make media or a final output, run without async-chunk or on model runner v2, are duplex,
    transfer KV, or make no chunks; and pooling requests, sessions and CFG companions (``__cfg_`` in an id). 0.28 does
    not tell a stage whether it is a final-output stage, so there clients get what upstream's split leaves them.
Fragility:
    Wraps ``OmniARScheduler.update_from_output`` and sets ``multimodal_output`` of its results, never the payload, which
    the save task has. The two lists of a step are compared by identity; where a runner made two, the patch says that it
    is superseded. That the next stage receives chunks follows from the stage's processor for chunks, known by its
    parameters. A middle stage with one, of four or more stages, and without a connector on its outgoing edge would be
    mistaken. No pipeline of 0.30 is like that.
Upstream thread:
    vllm-omni issue #4469, PR #3690.
Remove when:
    Upstream's runner splits the payload of every stage that sends chunks, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import STAGE_NAMES, AnySeam, Counter, Fit, Patch, Process, Relies, Wrap

AR_SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
CONNECTORS = "vllm_omni.distributed.omni_connectors.utils.config"
GENERATION = "vllm_omni.core.sched.omni_generation_scheduler"


SEAMS: tuple[AnySeam, ...] = (
    Wrap(AR_SCHEDULER, "OmniARScheduler.__init__", wrapper="wrapped_ar_init"),
    Wrap(AR_SCHEDULER, "OmniARScheduler.update_from_output", wrapper="wrapped_update_from_output"),
    Wrap(GENERATION, "OmniGenerationScheduler.__init__", wrapper="wrapped_generation_init"),
    # Upstream's own split, and the stages that have it.
    Relies("vllm_omni.utils.mm_outputs", "partition_flat_payload"),
    *(Relies(CONNECTORS, name) for name in ("stage_sends_async_output", "get_stage_connector_role")),
    Relies(AR_SCHEDULER, "OmniARScheduler"),
    Relies(ADAPTER, "OmniChunkTransferAdapter"),
    Relies("vllm_omni.config.model", "OmniModelConfig"),
    Relies("vllm_omni.request", "OmniRequest"),
    STAGE_NAMES,
    Relies("vllm.v1.core.sched.output", "SchedulerOutput"),
    Relies("vllm_omni.outputs", "OmniModelRunnerOutput"),
    Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
)

RECEIVES = Relies(CONNECTORS, "stage_receives_chunks")
"""Decides whether the orchestrator passes the payload on, without checking that the next stage has async-chunk."""

FROM_0_30 = Relies("vllm_omni.config.stage_config", "validate_stage_async_chunk_edges")

PATCH = Patch(
    name="forward_gate",
    summary="payloads for the next stage are not sent to the orchestrator as well",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    counters=(Counter("multimodal_outputs", "outputs that left the stage without their payload"),),
    rows=(
        Fit(releases=("0.28.0",), seams=(*SEAMS, RECEIVES)),
        Fit(releases=("0.30.0", "0.32.0rc1"), seams=(*SEAMS, FROM_0_30)),
    ),
)
