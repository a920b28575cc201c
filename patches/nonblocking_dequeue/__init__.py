"""A dequeue on the stage-output client that never waits.

What:
    Adds ``get_output_nowait()`` to vLLM's ``AsyncMPClient``: the next raw output, or None at once when the queue is
    empty. FIFO; a queued exception is raised just as ``get_output_async()`` raises it. ``get_output_async()`` stays.
Why:
    The only dequeue that vLLM has waits. The orchestrator must wrap it in a one-millisecond ``wait_for`` per stage
    replica and round, so that an empty stage costs a millisecond and every item a task (vllm-omni issue #4561).
Why not a hook:
    The queue is a private member of the client and vLLM has no hook there.
Scope:
    Orchestrator thread of the API server. It belongs to the loop that owns the queue: while the reader tasks of
    upstream's event-driven loop own it, it is not called. By itself it changes nothing: it is what ``budgeted_drain``
    calls, in either mode.
Fragility:
    Relies on ``outputs_queue`` being an ``asyncio.Queue`` whose items are batches or exceptions, on
    ``_ensure_output_queue_task`` and on ``_format_exception``; the body of ``get_output_async`` is pinned because
    ours must stay its twin. Where another package has given the class a ``get_output_nowait`` of its own the patch is
    unsupported: one of an RL framework raises when the queue is empty.
Upstream thread:
    vllm PR #46331 (open in September 2026), vllm-omni issue #4561.
Remove when:
    vLLM ships a ``get_output_nowait`` with this contract in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import Add, Call, Counter, Fit, Patch, Pin, Process, Reads

CORE_CLIENT = "vllm.v1.engine.core_client"

SEAMS = (
    Add(CORE_CLIENT, "AsyncMPClient.get_output_nowait", function="get_output_nowait"),
    Pin(CORE_CLIENT, "AsyncMPClient.get_output_async"),
    Call(CORE_CLIENT, "AsyncMPClient._ensure_output_queue_task"),
    Call(CORE_CLIENT, "MPClient._format_exception"),
    Reads(CORE_CLIENT, "AsyncMPClient", ("outputs_queue",)),
)

PATCH = Patch(
    name="nonblocking_dequeue",
    summary="a dequeue on the stage-output client that never waits",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("dequeued", "raw outputs taken without waiting"),
        Counter("empty", "calls that found the queue empty"),
    ),
    rows=(
        Fit(releases=("0.28.0", "0.30.0"), seams=SEAMS),
        Fit(releases=("0.32.0rc1",), preview=True, seams=SEAMS),
    ),
)
