"""In event-driven mode the front end takes messages on its event loop, and not through a thread for each.

What:
    Takes the orchestrator's next message as upstream's front end does in poll mode: at once if one is queued, else
    it looks again each millisecond.
Why:
    In event-driven mode a thread waits for each message and hands it to the event loop. That costs two hand-overs of
    the interpreter lock for each message, for which the thread waits behind the orchestrator. On a simulated node of
    eight H100s with 128 streams messages then wait for seconds, also with ``budgeted_drain``.
Why not a hook:
    Upstream's mode is one for the orchestrator and for the front end.
Scope:
    Event loop of the API server or of ``AsyncOmni`` in event-driven mode. In poll mode its counter stays 0, because
    upstream itself does the same.
Fragility:
    Replaces the engine's taker ("a message, or None after ``timeout`` if the orchestrator lives"). Upstream's own is
    called to raise if it died.
Upstream thread:
    vllm-omni PR #5221 (event-driven mode).
Remove when:
    Upstream's front end waits for messages on its event loop in every mode.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Replace, Row, State

BASE = "vllm_omni.engine.omni_engine_base"


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The taker of event-driven mode, and what it reads."""
    return (
        Replace(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_take"),
        Relies(module, f"{owner}.is_alive"),
        Relies(module, owner),
    )


PATCH = Patch(
    name="delivery",
    summary="in event-driven mode the front end takes messages without a thread",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("messages", "messages that were taken in event-driven mode"),),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_seams(BASE, "OmniEngineBase")),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            note="the front end waits on its event loop",
            seams=(Relies(BASE, "OmniEngineBase.get_outputs_async"),),
        ),
    ),
)
