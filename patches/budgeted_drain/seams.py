"""Where ``budgeted_drain`` takes hold of each release."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"

_DEATH = ("self", "stage_id", "replica_id", "error")


def _seams(
    owner: str,
    *,
    loop: str,
    event_driven: str,
    finish: str,
    route: str,
    poll: str,
    read: tuple[str, str],
    death: tuple[str, ...] = _DEATH,
) -> tuple[AnySeam, ...]:
    """Both loops, and the functions of upstream's that they are made of; ``read`` is a name and a fingerprint."""
    return (
        Replace(
            ORCHESTRATOR,
            f"{owner}._orchestration_loop",
            ("self",),
            wrapper="wrapped_orchestration_loop",
            fingerprints=(loop,),
        ),
        Replace(
            ORCHESTRATOR,
            f"{owner}._orchestration_loop_event_driven",
            ("self",),
            wrapper="wrapped_orchestration_loop_event_driven",
            fingerprints=(event_driven,),
        ),
        Wrap(
            STAGE_POOL,
            "StagePool.add_client",
            ("self", "input_addr", "client", "replica_id"),
            wrapper="wrapped_add_client",
        ),
        Pin(
            ORCHESTRATOR,
            f"{owner}._route_output",
            ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics"),
            fingerprints=(route,),
        ),
        Pin(
            ORCHESTRATOR,
            f"{owner}._finish_raw_terminal_requests",
            ("self", "stage_id", "replica_id", "request_ids"),
            fingerprints=(finish,),
        ),
        Pin(
            STAGE_POOL,
            "StagePool.poll_llm_raw_output",
            ("self", "replica_id", "timeout_s"),
            fingerprints=(poll,),
        ),
        Pin(STAGE_POOL, f"StagePool.{read[0]}", ("self", "client"), fingerprints=(read[1],)),
        Pin(
            STAGE_POOL,
            "StagePool.is_replica_available",
            ("self", "replica_id"),
            fingerprints=("c90d83059b66cbce",),
        ),
        Call(
            ORCHESTRATOR,
            f"{owner}._process_llm_stage_outputs",
            ("self", "stage_id", "replica_id", "raw_outputs", "raw_terminal_request_ids"),
        ),
        Call(ORCHESTRATOR, f"{owner}._handle_processed_outputs", ("self", "stage_id", "replica_id", "outputs")),
        Call(ORCHESTRATOR, f"{owner}._handle_dead_replica", death),
        Call(ORCHESTRATOR, f"{owner}._fail_request_dead_stage", ("self", "req_id", "stage_id")),
        Call(
            ORCHESTRATOR,
            f"{owner}._absorb_diffusion_metrics",
            ("self", "stage_id", "replica_id", "diffusion_output"),
        ),
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


_FROM_0_30: tuple[AnySeam, ...] = (
    Call(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size", ("self", "size")),
    Call("vllm_omni.diffusion.data", "is_diffusion_request_started_output", ("output",)),
)

ROWS = (
    Fit(
        releases=("0.28.0",),
        seams=_seams(
            "Orchestrator",
            loop="42d4a950500763d9",
            event_driven="bce77c1956149df1",
            finish="a537a9677161f0f8",
            route="0b0bcf6cb7d2ef22",
            poll="1f64fcbbbc3460c3",
            read=("_poll_stage_raw", "283365e69fc6f9c9"),
        ),
    ),
    Fit(
        releases=("0.30.0",),
        seams=(
            *_seams(
                "OrchestratorBase",
                loop="21526a0b0087ea6f",
                event_driven="9aaab0516c3a5edf",
                finish="f8a4ebe7d501312e",
                route="8b69561b20eb72c0",
                poll="1f64fcbbbc3460c3",
                read=("_poll_stage_raw", "835009208b1d6a59"),
            ),
            *_FROM_0_30,
        ),
    ),
    Fit(
        releases=("0.32.0rc1",),
        preview=True,
        seams=(
            *_seams(
                "OrchestratorBase",
                loop="21526a0b0087ea6f",
                event_driven="98b63969254e46d7",
                finish="21ef30f8d0fb1e52",
                route="8b69561b20eb72c0",
                poll="58360b06c339c3bc",
                read=("read_llm_raw_output", "6519623637caa04c"),
                death=(*_DEATH, "failed_request_id"),
            ),
            *_FROM_0_30,
            Pin(
                ORCHESTRATOR,
                "OrchestratorBase._route_upstream_first_audio",
                ("self", "stage_id", "replica_id", "raw_outputs"),
                fingerprints=("13741d11f3f74df8",),
            ),
        ),
    ),
)
