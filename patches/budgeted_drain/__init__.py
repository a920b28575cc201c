"""The orchestrator wakes when an output is there and drains each replica within a budget.

What:
    Replaces the orchestrator's poll loop. It sleeps until an output, a diffusion poll or shutdown is due; then each
    replica of a final-output stage is drained up to its first routable output, within an item and a time budget;
    a stage that nobody sees gives one item a pass. Raw outputs go one by one, in order, through upstream's own
    keep-or-drop rule, payload rehydration, processing, routing and terminal bookkeeping. They are never merged:
    merging changes audio.
Why:
    The poll loop takes one raw output per replica and round and waits up to a millisecond on every empty stage. The
    first audio packet stands behind outputs that nobody sees while the loop waits elsewhere (vllm-omni issue #4561).
Why not a hook:
    Upstream has none in the loop. The other way, an iterator over ``available_replica_ids()`` that yields a replica
    again while its queue has items, leaves upstream's loop body in place, but it must tell the loop's task from
    every other caller of the same method, cannot put stages in another order, cannot yield between stages except
    inside a poll, and ends each idle wait with upstream's own millisecond. In 0.30 the replaced body is forty lines
    that only call helpers; those helpers stay upstream's.
Scope:
    Orchestrator thread of the API server, ``AsyncOmni`` and ``Omni``, poll loop. A client without an output queue
    (upstream's test doubles) is polled as upstream polls it. Diffusion stages are polled as upstream polls them.
Fragility:
    High by design and therefore pinned: the body of ``_orchestration_loop`` is replaced, the bodies of
    ``poll_llm_raw_output`` and ``_poll_stage_raw`` are relied on. A changed body makes the patch unsupported and
    upstream's loop runs. The arrival is seen by an attribute put on each client's own queue object, because
    upstream's socket reader holds that object; it is taken off when the loop ends.
Upstream thread:
    vllm-omni issue #4561, PR #4608 (bounded drain of 16, open in September 2026), PR #5221 (event-driven loop).
Remove when:
    Upstream's default loop drains within a budget and fairly across stages.
"""

from __future__ import annotations

from pydantic import Field

from omni_fastpath.declare import Bypass, Options, Patch, Process, Seam, SeamKind, State


class DrainOptions(Options):
    """Values of ``budgeted_drain``."""

    max_items: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="raw outputs that one pass takes from a replica of a final-output stage; other stages give one",
    )
    max_time_us: int = Field(
        default=2000,
        ge=50,
        le=1_000_000,
        description="processing time, in microseconds, after which a replica's pass takes no further item",
    )
    stop_at_first_routable: bool = Field(
        default=True,
        description="end a replica's pass at the first raw output that brings somebody something",
    )


ORCHESTRATOR = "vllm_omni.engine.orchestrator"
STAGE_POOL = "vllm_omni.engine.stage_pool"

PATCH = Patch(
    name="budgeted_drain",
    summary="the orchestrator wakes on arrival and drains within an item and a time budget",
    processes=frozenset({Process.SERVER}),
    wrappers="omni_fastpath.patches.budgeted_drain.wrappers",
    tested=("0.30.0",),
    docs=__doc__,
    options=DrainOptions,
    requires=("nonblocking_dequeue",),
    counters={
        "items": "raw outputs processed",
        "passes": "passes over a replica that took at least one raw output",
        "ended_empty": "passes that ended because the queue was empty",
        "ended_routable": "passes that ended at a routable output with more queued",
        "ended_items": "passes that ended on the item budget with more queued (NAPI's time_squeeze)",
        "ended_time": "passes that ended on the time budget with more queued (NAPI's time_squeeze)",
        "judge_errors": "raw outputs that could not be judged; each ended its pass",
        "wakeups": "times the idle loop woke",
        "longest_stretch_us": "longest stretch between two yields to the event loop, microseconds (a maximum)",
    },
    maxima=("longest_stretch_us",),
    seams=(
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._orchestration_loop",
            ("self",),
            wrapper="wrapped_orchestration_loop",
            replaces=True,
            fingerprints=("21526a0b0087ea6f",),
        ),
        Seam(
            STAGE_POOL,
            "StagePool.add_client",
            ("self", "input_addr", "client", "replica_id"),
            wrapper="wrapped_add_client",
        ),
        Seam(
            STAGE_POOL,
            "StagePool.poll_llm_raw_output",
            ("self", "replica_id", "timeout_s"),
            SeamKind.PIN,
            fingerprints=("1f64fcbbbc3460c3",),
        ),
        Seam(
            STAGE_POOL,
            "StagePool._poll_stage_raw",
            ("self", "client"),
            SeamKind.PIN,
            fingerprints=("835009208b1d6a59",),
        ),
        Seam(STAGE_POOL, "StagePool.available_replica_ids", ("self",), SeamKind.PIN),
        Seam(STAGE_POOL, "StagePool.poll_diffusion_output", ("self", "replica_id"), SeamKind.PIN),
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._process_llm_stage_outputs",
            ("self", "stage_id", "replica_id", "raw_outputs", "raw_terminal_request_ids"),
            SeamKind.PIN,
        ),
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._handle_processed_outputs",
            ("self", "stage_id", "replica_id", "outputs"),
            SeamKind.PIN,
        ),
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._finish_raw_terminal_requests",
            ("self", "stage_id", "replica_id", "request_ids"),
            SeamKind.PIN,
        ),
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._handle_dead_replica",
            ("self", "stage_id", "replica_id", "error"),
            SeamKind.PIN,
        ),
        Seam(
            ORCHESTRATOR,
            "OrchestratorBase._absorb_diffusion_metrics",
            ("self", "stage_id", "replica_id", "diffusion_output"),
            SeamKind.PIN,
        ),
    ),
    bypasses=(
        Bypass(
            Seam(ORCHESTRATOR, "OrchestratorBase._orchestration_loop_event_driven", ("self",)),
            State.NOT_APPLICABLE,
            "upstream's event-driven loop runs; the drain replaces the poll loop only",
        ),
    ),
)
