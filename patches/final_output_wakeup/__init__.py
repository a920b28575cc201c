"""The last hop, from the orchestrator's queue to the front end, wakes on arrival and leaves others their turns.

What:
    In poll mode the front end looks into the orchestrator's queue and sleeps a millisecond when it is empty. With the
    patch an empty look waits for the next message, at most a quarter of a second, and returns it at once. In
    event-driven mode a thread of the front end's own waits for each message; with the patch the same wait as in poll
    mode takes its place. While messages wait all the time, the event loop gets a turn after each millisecond of work.
Why:
    Every message waits half a millisecond on average, and an idle server wakes a thousand times a second for nothing. A
    shorter sleep is no remedy: this loop runs on uvloop, where a sleep under half a millisecond spins. The thread of
    event-driven mode costs two hand-overs of the interpreter's lock a message, which it must win from the
    orchestrator's thread: with some thousand messages a second they take longer than the messages' own handling
    (measured at 0.1.0 by a replay whose arms are gone). In poll mode upstream's drain suspends only when the queue is
    empty: an orchestrator that does not pause for a millisecond at each empty stage, as upstream's poll loop does,
    keeps it full, and no other task of the event loop gets a turn.
Why not a hook:
    The drain is a closure; what it calls when the queue is empty is the only place to wait in.
Scope:
    Event loop of the API server or of ``AsyncOmni``, both modes. The synchronous ``Omni`` waits on the queue's
    condition already and is not touched.
Fragility:
    Wraps the engine's ``try_get_output_async``, whose contract is "a message, or None after a look at the
    orchestrator's liveness"; both looks remain upstream's. Replaces ``get_output_blocking_async``, which has the same
    contract and a timeout: None comes sooner than it allows, and its caller looks again. The arrival is seen in
    ``janus.Queue._put``, which janus documents as the method to override; an engine with another queue is left to
    upstream.
Upstream thread:
    vllm-omni PR #5221 (event-driven mode, merged in 0.28), PR #3690 (shorter sleep, closed). 0.32 waits on the event
    loop in both modes.
Remove when:
    Upstream's front end waits for messages on its event loop, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Pin, Process, Reads, Replace, Row, State, Wrap


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The drains of poll mode and of event-driven mode, and the queue's put."""
    return (
        Wrap(module, f"{owner}.try_get_output_async", wrapper="wrapped_try_get_output_async", pinned=True),
        Replace(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_get_output_blocking_async"),
        Call("janus", "Queue._put"),
        Pin("janus", "Queue._put_internal"),
        Reads(module, owner, ("output_queue",)),
    )


PATCH = Patch(
    name="final_output_wakeup",
    summary="the front end's drain of the orchestrator's queue wakes on arrival",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("woken", "waits that ended because a message arrived"),
        Counter("turns", "turns given to the event loop because messages were waiting all the time"),
        Counter("liveness_checks", "waits that ended without a message and looked whether the orchestrator lives"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_seams("vllm_omni.engine.omni_engine_base", "OmniEngineBase")),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            preview=True,
            seams=(Pin("vllm_omni.engine.omni_engine_base", "OmniEngineBase.get_outputs_async"),),
            note="the front end takes batches from the orchestrator's queue, which wakes its event loop, in both modes",
        ),
    ),
)
