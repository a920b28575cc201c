"""A request on its way in goes before the outputs of others on their way out.

What:
    From the application's first line to the submission to the orchestrator a request for generation is on its way.
    Meanwhile the front end does not hand out the next output: until no request is on its way, 5 ms at most, and a third
    of the time at most. In the orchestrator's thread whoever drains leaves the event loop the turns that a submitted
    request needs to reach its stage, before it takes the next output.
Why:
    Each output that is handed out makes work for the event loop that a new request needs a dozen turns of, and the
    threads that render and tokenise wait for the interpreter's lock behind it. With four replicas and 64 streams a
    request took 56 ms to the engine, of 213 ms to its first audio, with upstream's slower front end 11. What waits for
    it is mostly single tokens of others.
Why not a hook:
    Upstream has none between the socket and the engine, and its drain of the outputs is a closure.
Scope:
    Event loop of the API server, both modes; POST requests for chat, completions, responses, messages, speech and
    transcriptions. Images, videos, web sockets, ``/metrics``, ``/health`` and a library user's requests never count. A
    request that has not reached the orchestrator after 0.25 s counts no more: a slow client, a file from elsewhere or a
    paused engine holds nobody up.
Fragility:
    Nothing but time changes: whatever is wrapped runs as it is, once, with what it was given. Who is cancelled in a
    wait has taken no output. A request stops counting in ``finally``: submitted, refused, failed, cancelled or left by
    its client.
Upstream thread:
    vllm-omni issue #4561 (first audio under load), PR #5221 (event-driven loop).
Remove when:
    Upstream submits requests before it hands out outputs, or from a process of their own.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Reads, Wrap

ENGINE = "vllm_omni.engine.async_omni_engine"
BASE = "vllm_omni.engine.omni_engine_base"


def _seams(*drains: tuple[str, str]) -> tuple[AnySeam, ...]:
    """A request's way in, and the drains of the front end."""
    return (
        Wrap("fastapi.applications", "FastAPI.__call__", wrapper="wrapped_app"),
        Wrap(ENGINE, "AsyncOmniEngine.add_request_async", wrapper="wrapped_add_request_async"),
        Wrap("vllm_omni.engine.orchestrator", "Orchestrator._handle_add_request", wrapper="wrapped_handle_add_request"),
        Reads("vllm_omni.engine.messages", "StageSubmissionMessage", ("request_id",)),
        *(Wrap(module, qualname, wrapper="wrapped_drain") for module, qualname in drains),
    )


def _one_by_one(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The drains of poll mode and of event-driven mode."""
    return _seams((module, f"{owner}.try_get_output_async"), (module, f"{owner}.get_output_blocking_async"))


PATCH = Patch(
    name="requests_first",
    summary="a request on its way in goes before the outputs of others on their way out",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("submitted", "requests handed to the orchestrator"),
        Counter("requests", "requests for generation that were on their way, refused ones too"),
        Counter("waits", "times that outputs waited for requests on their way in"),
        Counter("waited_us", "time that outputs waited, microseconds"),
        Counter("cut_short", "waits that their bound ended before the last request was submitted"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_one_by_one(ENGINE, "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_one_by_one(BASE, "OmniEngineBase")),
        Fit(releases=("0.32.0rc1",), preview=True, seams=_seams((BASE, "OmniEngineBase.get_outputs_async"))),
    ),
)
