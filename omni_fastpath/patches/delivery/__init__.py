"""In event-driven mode the front end takes queued messages on its event loop, and not through a thread for each.

What:
    A message that is queued is taken at once, as in poll mode. If there is none, upstream's own function waits for one
    in its thread.
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
    Takes from the queue from which upstream's function takes, while that function does not run.
Upstream thread:
    vllm-omni PR #5221 (event-driven mode).
Remove when:
    Upstream's front end takes what is queued without a thread in every mode.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Row, State, Wrap

BASE = "vllm_omni.engine.omni_engine_base"


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The taker of event-driven mode, and what it reads."""
    return (
        Wrap(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_take"),
        Relies(module, owner),
    )


PATCH = Patch(
    name="delivery",
    summary="in event-driven mode the front end takes queued messages without a thread",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("messages", "queued messages that were taken without a thread"),),
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
