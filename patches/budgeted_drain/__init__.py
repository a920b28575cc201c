"""The orchestrator wakes when an output arrives and drains each replica within a budget, in an order of stages.

What:
    Replaces both of the orchestrator's loops, the poll loop and the event-driven one. The loop sleeps until an output
    arrives, a diffusion stage must be polled, or the server shuts down. While outputs are queued, it takes the stage
    that the order names, or a stage that got less than its floor of processing time, and makes a pass over one of its
    replicas. A pass ends when the queue is empty or the item or the time budget is spent. A routable output, one that
    has something for the user or the next stage, ends a pass only under ``stage_order`` and where a plugin chooses the
    stage. Under ``visible_first``, the default, and ``downstream_first`` outputs are not judged.
    Raw outputs pass one by one, in order, through upstream's own keep-or-drop rule, payload rehydration, processing,
    routing and terminal bookkeeping. They are never merged, because merging changes audio. Anything that ends a request
    (an entry, an error, a diffusion stage's output, a replica's death) is processed only after the outputs of that
    request that arrived earlier. While an end waits for a replica, that replica is served first.
    After an exception in this patch the server keeps running with upstream's loop and the same clients. Before that,
    the patch stops watching the queues and processes what it has taken and what is queued in the order of arrival.
Why:
    The poll loop takes one raw output per replica and round and waits up to a millisecond for every empty stage. The
    first audio packet is queued behind outputs that no user receives while the loop waits elsewhere (vllm-omni issue
    #4561). The event-driven loop does not wait, but puts all stages' outputs into one queue, first in first out, in
    front of one dispatcher, with a task for each. At high utilization a burst of the thinker's outputs is queued before
    the first audio.
Why not a hook:
    Upstream has none in the loop. The alternative, an iterator over ``available_replica_ids()`` that yields a replica
    again while its queue has items, leaves upstream's loop body in place, but must distinguish the loop's task from
    every other caller of the same method, cannot put stages in another order, cannot yield between stages except
    inside a poll, and ends each idle wait with upstream's own millisecond. In the event-driven loop queue and readers
    are locals of the method. The replaced bodies only call helpers, which are used as they are.
Scope:
    Orchestrator thread of the API server, ``AsyncOmni`` and ``Omni``, both modes. A client without an output queue
    (upstream's test doubles) is polled as upstream polls it. Diffusion stages are polled as upstream polls them.
    Payloads that model runner v2 packs are unpacked in both modes. Upstream's event-driven loop leaves them packed
    in 0.30, but not in 0.32. A dead replica is not selected while outputs of its requests from before its death are
    queued, but ``pick`` of a distributed pool asks only the hub and may choose it until then. In 0.32 a stage without
    final output may send a request's first audio (``talker_first_audio``). While that is queued, ``visible_first``
    treats the stage as one with final output.
Fragility:
    High by design. The patch replaces the bodies of both loops. It relies on the bodies of ``poll_llm_raw_output``
    and of the function that reads for it, and on those of ``_route_output`` and ``_finish_raw_terminal_requests``
    for what ends a request. All of them are pinned. If one changes, the patch is unsupported and upstream's loop
    runs. The patch notices an arrival by an attribute that it sets on each client's own queue object, because
    upstream's socket reader keeps a reference to that object. It removes the attribute when the loop ends. It reads
    the items of the queue from the ``deque`` inside of it, and polls a client whose queue has none. It reads
    ``multimodal_output`` of a completion, which no class declares. It adds a replica to ``_unavailable_replicas`` of
    a pool while the replica's death is held. A raw output with a held entry is processed as two copies.
Upstream thread:
    vllm-omni issue #4561, PR #4608 (bounded drain of 16, open in September 2026), PR #5221 (event-driven loop), issue
    #4680 (many replicas).
Remove when:
    Upstream's default loop drains within a budget, and serves stages in an order with floors.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import Counter, Options, Patch, Process

from .seams import ROWS


class DrainOptions(Options):
    """Values of ``budgeted_drain``."""

    max_items: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="most raw outputs that one pass takes from a replica",
    )
    max_time_us: int = Field(
        default=2000,
        ge=50,
        le=1_000_000,
        description="processing time, in microseconds, after which a pass takes no further raw output",
    )
    stop_at_first_routable: bool = Field(
        default=True,
        description="with stage_order, or if a plugin chooses the stage: a pass over a final-output stage ends at the "
        "first raw output with something for the user or the next stage. Otherwise without effect",
    )
    order: Literal["stage_order", "downstream_first", "visible_first"] = Field(
        default="visible_first", description="which stage is served first when several have raw outputs waiting"
    )
    floor: float | None = Field(
        default=None,
        ge=0.0,
        le=0.5,
        description="minimum share of processing time for each stage with a backlog; at most 0.5 for all stages "
        "together; null: min(0.1, 0.5 / number of stages)",
    )


PATCH = Patch(
    name="budgeted_drain",
    summary="the orchestrator wakes on arrival and drains within an item and a time budget",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=DrainOptions,
    requires=("nonblocking_dequeue",),
    counters=(
        Counter("items", "raw outputs processed", per_request=True, headline="outputs handled"),
        Counter("passes", "passes over a replica that took at least one raw output"),
        Counter("ended_empty", "passes that ended because the queue was empty"),
        Counter("ended_routable", "passes that ended at a routable output with more queued"),
        Counter("ended_items", "passes that ended on the item budget with more queued"),
        Counter("ended_time", "passes that ended on the time budget with more queued"),
        Counter("ended_floor", "passes over a stage that had less than its floor, with one raw output each"),
        Counter("ended_outranked", "passes that ended because another stage precedes it since the last yield"),
        Counter("held", "ends of requests, and outputs after them, held until earlier arrivals were dispatched"),
        Counter("wakeups", "times the idle loop woke"),
        Counter("longest_stretch_us", "longest stretch between two yields to the event loop", is_maximum=True),
        Counter("longest_away_us", "longest yield, in which socket readers and others run", is_maximum=True),
    ),
    rows=ROWS,
)
