"""Where ``budgeted_drain`` takes hold of each release."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"

_REPLICA = ("self", "stage_id", "replica_id")


def _replace(name: str, body: str) -> Replace:
    wrapper = f"wrapped{name.rpartition('.')[2]}"
    return Replace(ORCHESTRATOR, name, ("self",), wrapper=wrapper, fingerprints=(body,))


def _pin(module: str, name: str, body: str, *parameters: str) -> Pin:
    return Pin(module, name, parameters, fingerprints=(body,))


def _seams(
    owner: str, *, loop: str, event_driven: str, finish: str, route: str, poll: str, read: tuple[str, str]
) -> tuple[AnySeam, ...]:
    """Both loops, and the functions of upstream's that they are made of; ``read`` is a name and a fingerprint."""
    return (
        _replace(f"{owner}._orchestration_loop", loop),
        _replace(f"{owner}._orchestration_loop_event_driven", event_driven),
        Wrap(
            STAGE_POOL,
            "StagePool.add_client",
            ("self", "input_addr", "client", "replica_id"),
            wrapper="wrapped_add_client",
        ),
        _pin(ORCHESTRATOR, f"{owner}._route_output", route, *_REPLICA, "output", "req_state", "stage_metrics"),
        _pin(ORCHESTRATOR, f"{owner}._finish_raw_terminal_requests", finish, *_REPLICA, "request_ids"),
        _pin(STAGE_POOL, "StagePool.poll_llm_raw_output", poll, "self", "replica_id", "timeout_s"),
        _pin(STAGE_POOL, f"StagePool.{read[0]}", read[1], "self", "client"),
        _pin(STAGE_POOL, "StagePool.is_replica_available", "c90d83059b66cbce", "self", "replica_id"),
        Call(
            ORCHESTRATOR,
            f"{owner}._process_llm_stage_outputs",
            (*_REPLICA, "raw_outputs", "raw_terminal_request_ids"),
        ),
        Call(ORCHESTRATOR, f"{owner}._handle_processed_outputs", (*_REPLICA, "outputs")),
        Call(ORCHESTRATOR, f"{owner}._fail_request_dead_stage", ("self", "req_id", "stage_id")),
        Call(ORCHESTRATOR, f"{owner}._absorb_diffusion_metrics", (*_REPLICA, "diffusion_output")),
        Call(STAGE_POOL, "StagePool.available_replica_ids", ("self",)),
        Call(STAGE_POOL, "StagePool.live_replica_ids", ("self",)),
        Call(STAGE_POOL, "StagePool.get_bound_replica_id", ("self", "request_id")),
        Call(STAGE_POOL, "StagePool.poll_diffusion_output", ("self", "replica_id")),
        Call(STAGE_POOL, "StagePool.record_output_timestamps", ("self", "request_outputs", "output_ts")),
        Call(MONITOR, "OrchestratorMonitor.note_loop", ("self", "idle")),
        Call(MONITOR, "_NullOrchestratorMonitor.note_loop", ("self", "idle")),
        Call("vllm_omni.outputs.mm_outputs", "MultimodalPayload.get", ("self", "key", "default")),
        Call("vllm.v1.engine.core_client", "MPClient.shutdown", ("self", "timeout")),
    )


def _death(owner: str, *more: str) -> Call:
    return Call(ORCHESTRATOR, f"{owner}._handle_dead_replica", (*_REPLICA, "error", *more))


_FROM_0_30: tuple[AnySeam, ...] = (
    Call(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size", ("self", "size")),
    Call("vllm_omni.diffusion.data", "is_diffusion_request_started_output", ("output",)),
)

_0_28 = _seams(
    "Orchestrator",
    loop="42d4a950500763d9",
    event_driven="bce77c1956149df1",
    finish="a537a9677161f0f8",
    route="0b0bcf6cb7d2ef22",
    poll="1f64fcbbbc3460c3",
    read=("_poll_stage_raw", "283365e69fc6f9c9"),
)
_0_30 = _seams(
    "OrchestratorBase",
    loop="21526a0b0087ea6f",
    event_driven="9aaab0516c3a5edf",
    finish="f8a4ebe7d501312e",
    route="8b69561b20eb72c0",
    poll="1f64fcbbbc3460c3",
    read=("_poll_stage_raw", "835009208b1d6a59"),
)
_0_32 = _seams(
    "OrchestratorBase",
    loop="21526a0b0087ea6f",
    event_driven="98b63969254e46d7",
    finish="21ef30f8d0fb1e52",
    route="8b69561b20eb72c0",
    poll="58360b06c339c3bc",
    read=("read_llm_raw_output", "6519623637caa04c"),
)
_FIRST_AUDIO = _pin(
    ORCHESTRATOR, "OrchestratorBase._route_upstream_first_audio", "13741d11f3f74df8", *_REPLICA, "raw_outputs"
)

ROWS = (
    Fit(releases=("0.28.0",), seams=(*_0_28, _death("Orchestrator"))),
    Fit(releases=("0.30.0",), seams=(*_0_30, _death("OrchestratorBase"), *_FROM_0_30)),
    Fit(
        releases=("0.32.0rc1",),
        preview=True,
        seams=(*_0_32, _death("OrchestratorBase", "failed_request_id"), *_FROM_0_30, _FIRST_AUDIO),
    ),
)
