"""What waits in a server while it runs, and for how long, on ``/metrics``: on stock too.

What:
    Of each replica of a stage: how long a raw output took from its construction in the stage until the orchestrator had
    routed it, those with a request's first audio or first text once more by themselves; how many raw outputs wait in
    the client's queue. Of an API process: how late the event loops of the orchestrator and of the front end call what
    is due, and how long full garbage collections stopped it. Of each stage with async-chunk: how many tasks wait in its
    save queue.
Why:
    Nothing that upstream shows tells where a server's time went: a first audio that waits for a millisecond in its
    stage and for two seconds behind others' codec frames looks like a slow stage. Every other patch can be judged by
    these figures on a live server, with the patch and without it.
Why not a hook:
    Upstream has none around routing. Its own monitor of the orchestrator's loop writes a file at the end.
Scope:
    Orchestrator thread, in both of upstream's loops and under ``budgeted_drain``, which all call the two methods that
    are wrapped; the front end's event loop of ``vllm serve`` and ``AsyncOmni`` (``Omni`` has none); stage processes.
    Switched on in a server that serves already, it begins with the next orchestrator. Residence is of replicas that
    were spawned here or whose output comes by a local transport: another host's clock is another. A diffusion stage's
    outputs have no time of construction. First audio is what upstream counts frames of, at a stage whose audio goes to
    the user; first text what upstream takes for a first output that is not empty. A streaming session has both once for
    each segment. A first is missed where upstream forgets another request of that stage while it is processed. What the
    event-driven loop has read and not dispatched counts in residence, not in the depth. A raw output is two where
    ``budgeted_drain`` holds an end of it. What 0.32 routes inside of a raw output's processing counts as that raw
    output's. What stages, and other API processes, have is up to two seconds old.
Fragility:
    Relies on one raw output being processed and routed at a time. From 0.32 on ``batch`` of an entry of an adapter's
    queue is read, which no class declares.
Upstream thread:
    vllm-omni issue #4561 (asks for evidence at the level of queues).
Remove when:
    Upstream exports residence and depth of its queues.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Metric, Patch, Process, Reads, Wrap

RESIDENCE_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Buckets, seconds: from a raw output that is routed at once to one behind all others of an overloaded server."""

DELAY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of an event loop's lag and of a collection's pause, seconds."""

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
SAVING = "vllm_omni.distributed.omni_connectors.transfer_adapter.base"


def _seams(orchestrator: str, front_end: tuple[str, str]) -> tuple[AnySeam, ...]:
    module, owner = front_end
    handler, process = "_orchestration_output_handler", "_process_llm_stage_outputs"
    return (
        Wrap(ORCHESTRATOR, f"{orchestrator}.{handler}", wrapper="wrapped_orchestration_output_handler"),
        Wrap(ORCHESTRATOR, f"{orchestrator}.{process}", wrapper="wrapped_process_llm_stage_outputs"),
        Wrap(ORCHESTRATOR, f"{orchestrator}._handle_processed_outputs", wrapper="wrapped_handle_processed_outputs"),
        Wrap(module, f"{owner}._final_output_handler", wrapper="wrapped_final_output_handler"),
        Wrap(SAVING, "OmniTransferAdapterBase.__init__", wrapper="wrapped_adapter_made"),
        Reads(SAVING, "OmniTransferAdapterBase", ("_pending_save_reqs",)),
        Reads(ORCHESTRATOR, orchestrator, ("stage_pools",)),
        Reads(
            "vllm_omni.engine.stage_pool",
            "StagePool",
            (
                *("clients", "final_output", "_audio_frames_by_request"),
                "_non_empty_first_output_timestamps_by_request",
            ),
        ),
        Reads("vllm_omni.engine.stage_engine_core_client", "StageEngineCoreClientBase", ("final_output_type",)),
        Reads("vllm.v1.engine.core_client", "AsyncMPClient", ("outputs_queue", "resources")),
        Reads("vllm.v1.engine.core_client", "BackgroundResources", ("output_socket", "engine_manager")),
        Reads("vllm_omni.engine", "OmniEngineCoreOutputs", ("timestamp",)),
    )


_FROM_0_30 = _seams("OrchestratorBase", ("vllm_omni.entrypoints.async_omni_base", "AsyncOmniBase"))

PATCH = Patch(
    name="queue_metrics",
    summary="residence, depth, event-loop lag and pauses on /metrics, on stock too",
    processes=frozenset({Process.SERVER, Process.STAGE}),
    docs=__doc__,
    default_on=False,
    figures="figures",
    taken_off="taken_off",
    counters=(Counter("observed", "raw outputs that were routed, in a server; save queues, in a stage"),),
    metrics=(
        Metric(
            "omni_fastpath_residence_seconds",
            "From a raw output's construction in its stage until it was routed",
            bounds=RESIDENCE_S,
        ),
        Metric(
            "omni_fastpath_first_audio_residence_seconds",
            "The same, of raw outputs with a request's first audio, or with a streaming session's segment's",
            bounds=RESIDENCE_S,
        ),
        Metric(
            "omni_fastpath_first_text_residence_seconds",
            "The same, of raw outputs with a request's first text, or with a streaming session's segment's",
            bounds=RESIDENCE_S,
        ),
        Metric("omni_fastpath_queued_raw_outputs", "Raw outputs that wait in the queue of a replica's client"),
        Metric(
            "omni_fastpath_event_loop_lag_seconds",
            "How late an event loop called what was due",
            labels=("loop",),
            bounds=DELAY_S,
        ),
        Metric(
            "omni_fastpath_gc_pause_seconds",
            "How long the process stood still for a garbage collection of the oldest generation",
            bounds=DELAY_S,
        ),
        Metric("omni_fastpath_save_queue_tasks", "Tasks that wait in a stage's save queue"),
    ),
    rows=(
        Fit(
            releases=("0.28.0",),
            seams=_seams("Orchestrator", ("vllm_omni.entrypoints.async_omni", "AsyncOmni")),
            of_stages=(SAVING,),
        ),
        Fit(releases=("0.30.0",), seams=_FROM_0_30, of_stages=(SAVING,)),
        Fit(releases=("0.32.0rc1",), preview=True, seams=_FROM_0_30, of_stages=(SAVING,)),
    ),
)
