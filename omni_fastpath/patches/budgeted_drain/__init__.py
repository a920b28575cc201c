"""The orchestrator wakes when an output arrives, and processes outputs in the order of arrival, within a budget.

What:
    Replaces both of the orchestrator's loops. The loop sleeps until an output arrives, a diffusion stage must be polled
    or the server shuts down. All replicas share one line: what arrived first goes first, through upstream's own
    functions, alone (merging would change audio), and is routed at once. If audio waits behind text, every other turn
    is audio's. A pass ends when the line is empty or the budget is spent, and then the loop yields.
Why:
    The poll loop takes one raw output per replica and round, and waits up to a millisecond for every empty stage, while
    first audio is queued elsewhere (vllm-omni issue #4561). The event-driven loop does not wait, but has a task and a
    second queue for each output, and in both of its queues first audio waits behind all text.
Why not a hook:
    Upstream has none in the loop. The replaced bodies only call helpers, which are used as they are.
Scope:
    Orchestrator thread of the API server, ``AsyncOmni`` and ``Omni``, both modes. A client without an output queue
    (upstream's test doubles) and diffusion stages are polled when their turn in the line comes. Payloads that model
    runner v2 packs are unpacked in both modes. Upstream's event-driven loop of 0.30 leaves them packed.
Fragility:
    High by design: replaces the bodies of both loops. The functions through which upstream reads a client are pinned.
    An arrival is noticed by an attribute that the patch sets on each client's own queue object, to which upstream's
    socket reader keeps a reference. It removes the attribute when the loop ends.
Upstream thread:
    vllm-omni issue #4561, PR #4608 (bounded drain of 16, open in September 2026), PR #5221 (event-driven loop), issue
    #4680 (many replicas).
Remove when:
    Upstream's default loop wakes on arrival and drains within a budget in every supported release.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Process, Relies, Replace, Row, State, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"
MONITOR = "vllm_omni.engine.orchestrator_monitor"
MONITORS = ("OrchestratorMonitor", "_NullOrchestratorMonitor")


def _methods(module: str, owner: str, names: str) -> Iterator[Relies]:
    return (Relies(module, f"{owner}.{name}") for name in names.split())


def _seams(owner: str, *more: AnySeam) -> tuple[AnySeam, ...]:
    """Return both loops and the upstream functions that they call.

    Args:
        owner: The orchestrator's class.
        more: What only some releases have.
    """
    handling = "_process_llm_stage_outputs _handle_processed_outputs _finish_raw_terminal_requests"
    polling = "poll_llm_raw_output _poll_stage_raw poll_diffusion_output record_output_timestamps"
    return (
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop", wrapper="wrapped_loop"),
        Replace(ORCHESTRATOR, f"{owner}._orchestration_loop_event_driven", wrapper="wrapped_loop"),
        Wrap(STAGE_POOL, "StagePool.add_client", wrapper="wrapped_add_client"),
        Relies(ORCHESTRATOR, owner),
        *_methods(ORCHESTRATOR, owner, f"{handling} _handle_dead_replica _absorb_diffusion_metrics"),
        Relies(STAGE_POOL, "StagePool"),
        *_methods(STAGE_POOL, "StagePool", f"{polling} available_replica_ids is_replica_available"),
        *(Relies(MONITOR, f"{each}.note_loop") for each in MONITORS),
        Relies("vllm.v1.engine.core_client", "AsyncMPClient"),
        *(Relies("vllm.v1.engine", name) for name in ("EngineCoreOutputs", "EngineCoreOutput")),
        *more,
    )


_FROM_0_30 = (
    *(Relies(MONITOR, f"{each}.set_dispatch_queue_size") for each in MONITORS),
    Relies("vllm_omni.diffusion.data", "is_diffusion_request_started_output"),
)


class DrainOptions(Options):
    """Values of ``budgeted_drain``."""

    max_items: int = Field(default=16, ge=1, le=4096, description="most raw outputs before the loop yields")
    max_time_us: int = Field(default=2000, ge=50, le=1_000_000, description="microseconds after which the loop yields")


_IN_LINE = "removed in 0.4, because outputs are processed in the order of arrival; leave it out"

PATCH = Patch(
    name="budgeted_drain",
    summary="the orchestrator wakes on arrival and drains within an item and a time budget",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=DrainOptions,
    removed=dict.fromkeys(("order", "floor", "stop_at_first_routable"), _IN_LINE),
    requires=("nonblocking_dequeue",),
    counters=(
        Counter("items", "raw outputs taken"),
        Counter("ended_empty", "passes that ended because the line was empty"),
        Counter("ended_items", "passes that ended on the item budget with more queued"),
        Counter("ended_time", "passes that ended on the time budget with more queued"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("Orchestrator")),
        Fit(releases=("0.30.0",), seams=_seams("OrchestratorBase", *_FROM_0_30)),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            note="the default, event-driven loop wakes on arrival; no difference is shown; the drain's hooks are off",
            seams=(Relies(ORCHESTRATOR, "OrchestratorBase._orchestration_loop_event_driven"),),
        ),
    ),
)
