"""Where ``budgeted_drain`` takes hold of each release."""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Fit, Pin, Replace, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"

_CLIENT = ("self", "input_addr", "client")
_DEATH = ("self", "stage_id", "replica_id", "error")
_ONE_ROUND = "upstream's own loop runs for each raw output"

_ANYWHERE: tuple[AnySeam, ...] = (
    Call(STAGE_POOL, "StagePool.live_replica_ids", ("self",)),
    Call(STAGE_POOL, "StagePool.get_bound_replica_id", ("self", "request_id")),
    Call(STAGE_POOL, "StagePool.poll_diffusion_output", ("self", "replica_id")),
)

_AVAILABILITY: tuple[AnySeam, ...] = (
    Call(STAGE_POOL, "StagePool.available_replica_ids", ("self",)),
    Pin(STAGE_POOL, "StagePool.is_replica_available", ("self", "replica_id"), fingerprints=("c90d83059b66cbce",)),
)

_MONITOR: tuple[AnySeam, ...] = (
    Call(MONITOR, "OrchestratorMonitor.note_loop", ("self", "idle")),
    Call(MONITOR, "_NullOrchestratorMonitor.note_loop", ("self", "idle")),
)


def _poll_loop(owner: str, body: str) -> Replace:
    path = f"{owner}._orchestration_loop"
    return Replace(ORCHESTRATOR, path, ("self",), wrapper="wrapped_orchestration_loop", fingerprints=(body,))


def _add_client(*parameters: str) -> Wrap:
    return Wrap(STAGE_POOL, "StagePool.add_client", parameters, wrapper="wrapped_add_client")


def _poll(body: str) -> Pin:
    parameters = ("self", "replica_id", "timeout_s")
    return Pin(STAGE_POOL, "StagePool.poll_llm_raw_output", parameters, fingerprints=(body,))


def _read(body: str, name: str = "_poll_stage_raw") -> Pin:
    return Pin(STAGE_POOL, f"StagePool.{name}", ("self", "client"), fingerprints=(body,))


def _route(owner: str, body: str) -> Pin:
    parameters = ("self", "stage_id", "replica_id", "output", "req_state", "stage_metrics")
    return Pin(ORCHESTRATOR, f"{owner}._route_output", parameters, fingerprints=(body,))


def _payload(module: str, *parameters: str) -> Call:
    return Call(module, "MultimodalPayload.get", ("self", "key", *parameters))


def _inlined(*, loop: str, route: str) -> tuple[AnySeam, ...]:
    """Up to 0.26: the loop, which is called for each raw output, and what its stand-in for a pool calls."""
    return (
        _poll_loop("Orchestrator", loop),
        _route("Orchestrator", route),
        Pin(
            ORCHESTRATOR,
            "Orchestrator._apply_raw_terminal_stage_finish",
            ("self", "stage_id", "eco", "req_state"),
            fingerprints=("0f463cc7828c8340",),
        ),
        Call(
            STAGE_POOL,
            "StagePool.process_llm_raw_outputs",
            ("self", "replica_id", "raw_outputs", "iteration_stats"),
        ),
        *_ANYWHERE,
    )


def _helpers(
    owner: str, *, loop: str, event_driven: str, finish: str, route: str, death: tuple[str, ...] = _DEATH
) -> tuple[AnySeam, ...]:
    """From 0.28 on: both loops, and the functions of upstream's that they are made of."""
    return (
        _poll_loop(owner, loop),
        Replace(
            ORCHESTRATOR,
            f"{owner}._orchestration_loop_event_driven",
            ("self",),
            wrapper="wrapped_orchestration_loop_event_driven",
            fingerprints=(event_driven,),
        ),
        _route(owner, route),
        Pin(
            ORCHESTRATOR,
            f"{owner}._finish_raw_terminal_requests",
            ("self", "stage_id", "replica_id", "request_ids"),
            fingerprints=(finish,),
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
        Call(STAGE_POOL, "StagePool.record_output_timestamps", ("self", "request_outputs", "output_ts")),
        _add_client(*_CLIENT, "replica_id"),
        _payload("vllm_omni.outputs.mm_outputs", "default"),
        Call("vllm.v1.engine.core_client", "MPClient.shutdown", ("self", "timeout")),
        *_ANYWHERE,
        *_AVAILABILITY,
        *_MONITOR,
    )


_FROM_0_30: tuple[AnySeam, ...] = (
    Call(MONITOR, "OrchestratorMonitor.set_dispatch_queue_size", ("self", "size")),
    Call("vllm_omni.diffusion.data", "is_diffusion_request_started_output", ("output",)),
)

ROWS = (
    Fit(
        releases=("0.22.0",),
        note=_ONE_ROUND,
        seams=(
            *_inlined(loop="721cf8536ca0a22c", route="c0bc90513a41f851"),
            _add_client(*_CLIENT),
            _poll("066becee8587fa20"),
            _read("98ea03d51976e0df"),
            _payload("vllm_omni.engine.mm_outputs"),
        ),
    ),
    Fit(
        releases=("0.24.0",),
        note=_ONE_ROUND,
        seams=(
            *_inlined(loop="cd6aad542b96865f", route="c0bc90513a41f851"),
            _add_client(*_CLIENT),
            _poll("066becee8587fa20"),
            _read("98ea03d51976e0df"),
            _payload("vllm_omni.engine.mm_outputs", "default"),
            *_MONITOR,
        ),
    ),
    Fit(
        releases=("0.26.0",),
        note=_ONE_ROUND,
        seams=(
            *_inlined(loop="8a1c782ecf871fd2", route="8839d55180dd1380"),
            _add_client(*_CLIENT, "replica_id"),
            _poll("1f64fcbbbc3460c3"),
            _read("283365e69fc6f9c9"),
            _payload("vllm_omni.outputs.mm_outputs", "default"),
            Pin(
                STAGE_POOL,
                "StagePool.mark_replica_unavailable",
                ("self", "replica_id"),
                fingerprints=("bd2dba05ac676b8f",),
            ),
            Call(STAGE_POOL, "StagePool.release_bindings", ("self", "request_ids")),
            *_AVAILABILITY,
            *_MONITOR,
        ),
    ),
    Fit(
        releases=("0.28.0",),
        seams=(
            *_helpers(
                "Orchestrator",
                loop="42d4a950500763d9",
                event_driven="bce77c1956149df1",
                finish="a537a9677161f0f8",
                route="0b0bcf6cb7d2ef22",
            ),
            _poll("1f64fcbbbc3460c3"),
            _read("283365e69fc6f9c9"),
        ),
    ),
    Fit(
        releases=("0.30.0",),
        seams=(
            *_helpers(
                "OrchestratorBase",
                loop="21526a0b0087ea6f",
                event_driven="9aaab0516c3a5edf",
                finish="f8a4ebe7d501312e",
                route="8b69561b20eb72c0",
            ),
            _poll("1f64fcbbbc3460c3"),
            _read("835009208b1d6a59"),
            *_FROM_0_30,
        ),
    ),
    Fit(
        releases=("0.32.0rc1",),
        preview=True,
        seams=(
            *_helpers(
                "OrchestratorBase",
                loop="21526a0b0087ea6f",
                event_driven="98b63969254e46d7",
                finish="21ef30f8d0fb1e52",
                route="8b69561b20eb72c0",
                death=(*_DEATH, "failed_request_id"),
            ),
            _poll("58360b06c339c3bc"),
            _read("6519623637caa04c", "read_llm_raw_output"),
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
