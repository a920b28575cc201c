"""The front end wakes when a message arrives, on its event loop, in both modes.

What:
    If no message is queued, the front end's event loop waits for the next one, which wakes it. What is queued is taken
    at once, with a turn of the event loop after each 256.
Why:
    In poll mode the front end asks a thousand times per second, and each time needs the interpreter lock, which the
    orchestrator needs too. In event-driven mode a thread waits for each message and hands it to the event loop, which
    costs two hand-overs of that lock per message. The turns let handlers answer users while messages are still queued,
    which shortens the longest pause in a text where the API process is overloaded.
Why not a hook:
    Upstream chooses one of these two ways to wait when the front end starts, and nothing replaces them.
Scope:
    Event loop of the API server or of ``AsyncOmni``.
Fragility:
    Overrides ``_put`` of the janus queue, and takes from it what upstream's function would take. The check whether the
    orchestrator lives remains upstream's.
Upstream thread:
    vllm-omni PR #5221 (event-driven mode), PR #3690 (shorter sleep, closed).
Remove when:
    Upstream's front end waits for messages on its event loop.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Row, State, Wrap

BASE = "vllm_omni.engine.omni_engine_base"


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The takers of both modes, what they read, and what is overridden."""
    return (
        Wrap(module, f"{owner}.try_get_output_async", wrapper="wrapped_try"),
        Wrap(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_take"),
        Relies(module, owner),
        *(Relies("janus", f"Queue.{name}") for name in ("_put", "_put_internal")),
    )


PATCH = Patch(
    name="delivery",
    summary="the front end wakes when a message arrives",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("waits", "waits for a message on the event loop"),),
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
