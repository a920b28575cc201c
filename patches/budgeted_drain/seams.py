"""Where ``budgeted_drain`` takes hold of each release."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"

_REPLICA = ("self", "stage_id", "replica_id")
_ATTACH = ("self", "input_addr", "client", "replica_id")


def _loop(name: str, body: str, *others: str) -> Replace:
    return Replace(ORCHESTRATOR, name, ("self",), wrapper="wrapped_loop", fingerprints=(body, *others))


def _pool(name: str, parameters: tuple[str, ...], body: str, *others: str) -> Pin:
    return Pin(STAGE_POOL, f"StagePool.{name}", parameters, fingerprints=(body, *others))


def _seams(owner: str, read: str, *more: AnySeam, death: tuple[str, ...] = ()) -> tuple[AnySeam, ...]:
    """Both loops, and the functions of upstream's that they are made of.

    Where a body differs between releases, it has the fingerprint of each that was read, the oldest first.

    Args:
        owner: The orchestrator's class.
        read: The stage pool's reading of a client.
        more: What only some releases have.
        death: What else the handling of a replica's death is given.
    """

    def pin(name: str, parameters: tuple[str, ...], body: str, *others: str) -> Pin:
        return Pin(ORCHESTRATOR, f"{owner}.{name}", parameters, fingerprints=(body, *others))

    def call(name: str, *parameters: str) -> Call:
        return Call(ORCHESTRATOR, f"{owner}.{name}", parameters)

    return (
        _loop(f"{owner}._orchestration_loop", "42d4a950500763d9", "21526a0b0087ea6f"),
        _loop(f"{owner}._orchestration_loop_event_driven", "bce77c1956149df1", "9aaab0516c3a5edf", "98b63969254e46d7"),
        Wrap(STAGE_POOL, "StagePool.add_client", _ATTACH, wrapper="wrapped_add_client"),
        pin(
            "_route_output", (*_REPLICA, "output", "req_state", "stage_metrics"), "0b0bcf6cb7d2ef22", "8b69561b20eb72c0"
        ),
        pin(
            "_finish_raw_terminal_requests",
            (*_REPLICA, "request_ids"),
            *("a537a9677161f0f8", "f8a4ebe7d501312e", "21ef30f8d0fb1e52"),
        ),
        _pool("poll_llm_raw_output", ("self", "replica_id", "timeout_s"), "1f64fcbbbc3460c3", "58360b06c339c3bc"),
        _pool(read, ("self", "client"), "283365e69fc6f9c9", "835009208b1d6a59", "6519623637caa04c"),
        _pool("is_replica_available", ("self", "replica_id"), "c90d83059b66cbce"),
        call("_process_llm_stage_outputs", *_REPLICA, "raw_outputs", "raw_terminal_request_ids"),
        call("_handle_processed_outputs", *_REPLICA, "outputs"),
        call("_handle_dead_replica", *_REPLICA, "error", *death),
        call("_fail_request_dead_stage", "self", "req_id", "stage_id"),
        call("_absorb_diffusion_metrics", *_REPLICA, "diffusion_output"),
        Call(STAGE_POOL, "StagePool.available_replica_ids", ("self",)),
        Call(STAGE_POOL, "StagePool.live_replica_ids", ("self",)),
        Call(STAGE_POOL, "StagePool.get_bound_replica_id", ("self", "request_id")),
        Call(STAGE_POOL, "StagePool.poll_diffusion_output", ("self", "replica_id")),
        Call(STAGE_POOL, "StagePool.record_output_timestamps", ("self", "request_outputs", "output_ts")),
        Call(MONITOR, "OrchestratorMonitor.note_loop", ("self", "idle")),
        Call(MONITOR, "_NullOrchestratorMonitor.note_loop", ("self", "idle")),
        Call("vllm_omni.outputs.mm_outputs", "MultimodalPayload.get", ("self", "key", "default")),
        Call("vllm.v1.engine.core_client", "MPClient.shutdown", ("self", "timeout")),
        *more,
    )


_FROM_0_30 = (
    Call(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size", ("self", "size")),
    Call("vllm_omni.diffusion.data", "is_diffusion_request_started_output", ("output",)),
)
_FROM_0_32 = Pin(
    ORCHESTRATOR,
    "OrchestratorBase._route_upstream_first_audio",
    (*_REPLICA, "raw_outputs"),
    fingerprints=("13741d11f3f74df8",),
)

_0_28 = _seams("Orchestrator", "_poll_stage_raw")
_0_30 = _seams("OrchestratorBase", "_poll_stage_raw", *_FROM_0_30)
_0_32 = _seams("OrchestratorBase", "read_llm_raw_output", *_FROM_0_30, _FROM_0_32, death=("failed_request_id",))

ROWS = (
    Fit(releases=("0.28.0",), seams=_0_28),
    Fit(releases=("0.30.0",), seams=_0_30),
    Fit(releases=("0.32.0rc1",), preview=True, seams=_0_32),
)
