"""Where a server's time is spent, queues, and requests without output, on ``/metrics``, also on stock.

What:
    For the first audio and the first text of each streamed answer: how long it took, leg by leg, and how many raw
    outputs and messages were ahead of it. For each replica: how long raw outputs take until they are routed, how many
    are queued, and which requests had no output of any stage for 30 seconds. How late the event loops of the
    orchestrator and of the front end run a timer, and how full ``/dev/shm`` is.
Why:
    Upstream's metrics do not show where time is spent. A first audio that waits a millisecond in its stage and two
    seconds behind the codec frames of others looks like a slow stage, and a stage that hangs like a long request.
Why not a hook:
    Upstream has none around routing. Its own monitor of the orchestrator's loop writes a file at the end.
Scope:
    Both upstream loops, and ``budgeted_drain``. Legs: the first request of an HTTP POST whose answer is sent in
    parts. Only replicas on this host are timed. Outputs of a diffusion stage are not, and a request there, or a session
    that waits for its client, or one of a paused engine, never counts as without output. A first output is missed if
    upstream forgets another request while it is processed, and all are with 0.32's ``--no-collect-stage-metrics``. What
    the event-driven loop has read and not dispatched counts in times but not in the depth. Without async-chunk,
    ``engines`` includes the orchestrator's work between two stages.
Fragility:
    Relies on one raw output being processed and routed at a time. The queue between orchestrator and front end gets
    another ``_put`` as an attribute, and a request's queue in the front end another ``_put`` and ``_get`` until its
    first outputs have arrived. Read, but declared by no class: ``transport`` of uvicorn's connection.
Upstream thread:
    vllm-omni issue #4561 (requests the times of a first audio, the depth of queues and what is ahead of it).
Remove when:
    Upstream exports these times and depths.
"""

from __future__ import annotations

from omni_fastpath.declare import Advice, AnySeam, Counter, Fit, Metric, Patch, Process, Relies, Wrap

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
"""Buckets, from an immediate result to a wait in an overloaded server, fine where listeners notice a difference."""

AHEAD = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Buckets for the number of items ahead in a queue."""

PREFIX = "omni_fastpath_"

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
STATE = "vllm_omni.entrypoints.client_request_state"


def _fit(
    *releases: str,
    loop: str = "OrchestratorBase",
    front_end: tuple[str, str] = ("vllm_omni.entrypoints.async_omni_base", "AsyncOmniBase._final_output_handler"),
) -> Fit:
    """The row of these releases, by their names of the orchestrator and of the front end."""
    seams: tuple[AnySeam, ...] = (
        Wrap(STATE, "ClientRequestState.__init__", wrapper="wrapped_request_made"),
        *(Relies("asyncio.queues", f"Queue.{name}") for name in ("_put", "_get")),
        *(Relies("janus", name) for name in ("Queue._put", "Queue._put_internal", "_SyncQueueProxy.qsize")),
        Wrap(STAGE_POOL, "StagePool.submit_initial", wrapper="wrapped_submit_initial"),
        Relies(STAGE_POOL, "StagePool.get_bound_replica_id"),
        Wrap(ORCHESTRATOR, f"{loop}._orchestration_output_handler", wrapper="wrapped_output_handler"),
        Wrap(ORCHESTRATOR, f"{loop}._process_llm_stage_outputs", wrapper="wrapped_process_llm_stage_outputs"),
        Wrap(ORCHESTRATOR, f"{loop}._handle_processed_outputs", wrapper="wrapped_handle_processed_outputs"),
        Wrap(*front_end, wrapper="wrapped_final_output_handler"),
        *(Relies(ORCHESTRATOR, name) for name in (loop, "OrchestratorRequestState")),
        Relies(STATE, "ClientRequestState"),
        Relies("vllm_omni.entrypoints.async_omni", "AsyncOmni"),
        Relies("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine"),
        Relies("vllm_omni.engine.messages", "OutputMessage"),
        Relies(STAGE_POOL, "StagePool"),
        Relies("vllm_omni.engine.stage_engine_core_client", "StageEngineCoreClientBase"),
        *(Relies("vllm.v1.engine.core_client", name) for name in ("AsyncMPClient", "BackgroundResources")),
        Relies("vllm_omni.engine", "OmniEngineCoreOutputs"),
    )
    return Fit(releases=releases, seams=seams)


_IN_0_28 = ("vllm_omni.entrypoints.async_omni", "AsyncOmni._final_output_handler")


def _metric(name: str, meaning: str, *labels: str, bounds: tuple[float, ...] | None = None) -> Metric:
    return Metric(PREFIX + name, meaning, labels=labels, bounds=bounds, advice=ADVICE.get(name))


ADVICE = {
    "first_output_api_process_seconds": Advice(
        finding="first-output",
        severity="info",
        what="first {output}: its time in the API process has a 99th percentile of about {value:.2f} s",
        do="If that is above 0.05 s and above a tenth of the engines' part, switch on the patches that are off "
        "(`OMNI_FASTPATH=1`), or use a higher `--api-server-count` (from vLLM-Omni 0.30 on).",
    ),
    "first_output_leg_seconds": Advice(
        finding="first-output",
        severity="info",
        labels={"leg": "engines"},
        what="first {output}: its time in the engines has a 99th percentile of about {value:.2f} s",
        do="If that is above 0.3 s and requests wait there (`vllm_omni:num_requests_waiting`), add GPUs or "
        "replicas. If none waits, the model itself takes that long. Neither this package nor another API server "
        "changes this part.",
    ),
    "requests_without_output": Advice(
        finding="requests-without-output",
        what="{value:.0f} requests wait for stage {stage} replica {replica} and had no output for 30 s",
        do="Check that replica's process and log. It may be stopped or hanging, or waiting for a chunk that the "
        "previous stage does not send. In an overloaded server, requests also wait that long.",
    ),
    "shared_memory_used_ratio": Advice(
        finding="shared-memory",
        above=0.8,
        what="shared memory is {value:.0%} full, and a stage that finds no room for a chunk fails",
        do="Give the container a larger /dev/shm (`--shm-size`, or an emptyDir of medium Memory).",
    ),
}
"""What ``doctor`` says about the metrics, by their names without the prefix."""

PATCH = Patch(
    name="queue_metrics",
    summary="where time is spent, queues, and requests without output, on /metrics",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    default_on=False,
    requires=("connections",),
    counters=(Counter("observed", "raw outputs that were measured"),),
    metrics=(
        _metric("first_output_seconds", "From a request to its first audio, or text", "output", bounds=SECONDS),
        _metric("first_output_api_process_seconds", "This time without the engines' leg", "output", bounds=SECONDS),
        _metric("first_output_leg_seconds", "The legs of this time", "output", "leg", bounds=SECONDS),
        _metric("first_output_ahead", "The number of items ahead of it in each queue", "output", "queue", bounds=AHEAD),
        _metric("residence_seconds", "From a raw output's construction until it was routed", bounds=SECONDS),
        _metric("queued_raw_outputs", "Raw outputs in the queue of a replica's client"),
        _metric("queued_messages", "Messages that are queued for the front end"),
        _metric("requests_without_output", "Requests that wait for a replica, without an output for 30 seconds"),
        _metric("longest_without_output_seconds", "The longest time that a request at a replica had no output"),
        _metric("shared_memory_used_ratio", "The used share of /dev/shm, from 0 to 1"),
        _metric("event_loop_lag_seconds", "How late an event loop ran a timer", "loop", bounds=SECONDS),
    ),
    rows=(_fit("0.28.0", loop="Orchestrator", front_end=_IN_0_28), _fit("0.30.0", "0.32.0rc1")),
)
