"""A dequeue on the stage-output client that never waits.

What:
    Adds ``get_output_nowait()`` to vLLM's ``AsyncMPClient``. It returns the next raw output, or None at once if the
    queue is empty. The order is FIFO. A queued exception is raised as ``get_output_async()`` raises it, which stays.
Why:
    vLLM's only dequeue waits. The orchestrator must wrap it in a ``wait_for`` of a millisecond per stage replica and
    round, so that an empty stage costs a millisecond and every raw output a task (vllm-omni issue #4561).
Why not a hook:
    The queue is a private member of the client and vLLM has no hook there.
Scope:
    Orchestrator thread of the API server, on the event loop that owns the queue. It is not called while the reader
    tasks of upstream's event-driven loop own the queue. By itself it changes nothing. ``budgeted_drain`` calls it, in
    both modes.
Fragility:
    Relies on ``outputs_queue`` being an ``asyncio.Queue`` whose items are batches or exceptions, on
    ``_ensure_output_queue_task`` and on ``_format_exception``. The body of ``get_output_async`` is pinned, because
    the new method must do the same. If another package has given the class its own ``get_output_nowait``, the patch is
    unsupported, because that of an RL framework raises when the queue is empty.
Upstream thread:
    vllm PR #46331 (open in September 2026), vllm-omni issue #4561.
Remove when:
    vLLM ships a ``get_output_nowait`` with this contract in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import Add, Counter, Fit, Patch, Process, Relies, Row, State

CORE_CLIENT = "vllm.v1.engine.core_client"

SEAMS = (
    Add(CORE_CLIENT, "AsyncMPClient.get_output_nowait", function="get_output_nowait"),
    Relies(CORE_CLIENT, "AsyncMPClient.get_output_async"),
    Relies(CORE_CLIENT, "AsyncMPClient._ensure_output_queue_task"),
    Relies(CORE_CLIENT, "MPClient._format_exception"),
    Relies(CORE_CLIENT, "AsyncMPClient"),
)

PATCH = Patch(
    name="nonblocking_dequeue",
    summary="a dequeue on the stage-output client that never waits",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("dequeued", "raw outputs taken without waiting"),),
    rows=(
        Fit(releases=("0.28.0", "0.30.0"), seams=SEAMS),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            note="the event-driven loop, the default, waits in a task of each replica",
            seams=(Relies("vllm_omni.engine.orchestrator", "OrchestratorBase._orchestration_loop_event_driven"),),
        ),
    ),
)
