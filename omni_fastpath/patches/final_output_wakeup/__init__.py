"""The front end wakes when the orchestrator sends a message, and lets other tasks of its event loop run.

What:
    In poll mode, upstream's front end checks the orchestrator's queue and sleeps for a millisecond when it is empty.
    With the patch, a check of an empty queue waits for the next message, for up to 0.25 s, and returns it at once. In
    event-driven mode, upstream's front end has a thread that waits for each message. With the patch it waits as in poll
    mode. While messages are queued all the time, the event loop gets a turn after every eight messages.
Why:
    In poll mode every message waits half a millisecond on average, and an idle server wakes a thousand times per second
    for nothing. A shorter sleep does not help, because a sleep of less than half a millisecond spins on uvloop. The
    thread of event-driven mode costs two hand-overs of the interpreter lock per message, and the orchestrator competes
    for that lock. Upstream's drain suspends only when the queue is empty, so with an orchestrator that keeps it full no
    other task of the event loop runs.
Why not a hook:
    The drain is a closure. The function that it calls when the queue is empty is the only place where it can wait.
Scope:
    Event loop of the API server or of ``AsyncOmni``, both modes. The synchronous ``Omni`` is not touched, because it
    already waits on the queue's condition.
Fragility:
    Wraps the engine's ``try_get_output_async``. Its contract is "a message, or None after checking that the
    orchestrator lives", and both the message and the check remain upstream's. Replaces ``get_output_blocking_async``,
    which has the same contract and a timeout. The patch returns None before that timeout, and the caller asks again.
    Arrivals are noticed in ``janus.Queue._put``, which janus documents as the method to override. An engine with
    another kind of queue is left to upstream.
Upstream thread:
    vllm-omni PR #5221 (event-driven mode, merged in 0.28), PR #3690 (shorter sleep, closed). 0.32 waits on the event
    loop in both modes.
Remove when:
    Upstream's front end waits for messages on its event loop, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Pin, Process, Reads, Replace, Row, State, Wrap


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The drains of poll mode and of event-driven mode, and ``_put`` of the queue."""
    return (
        Wrap(module, f"{owner}.try_get_output_async", wrapper="wrapped_try_get_output_async", pinned=True),
        Replace(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_get_output_blocking_async"),
        Call("janus", "Queue._put"),
        Pin("janus", "Queue._put_internal"),
        Reads(module, owner, ("output_queue",)),
    )


PATCH = Patch(
    name="final_output_wakeup",
    summary="the front end wakes when the orchestrator sends a message",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("woken", "waits that a message ended"),
        Counter("turns", "turns that the event loop got while messages were queued all the time"),
        Counter("liveness_checks", "waits that ended without a message, after which the orchestrator was checked"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_seams("vllm_omni.engine.omni_engine_base", "OmniEngineBase")),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            preview=True,
            seams=(Pin("vllm_omni.engine.omni_engine_base", "OmniEngineBase.get_outputs_async"),),
            note="the front end takes batches from the orchestrator's queue, which wakes its event loop",
        ),
    ),
)
