"""Incoming requests precede the outputs of other requests.

What:
    A request for generation is on its way from the end of its body until it is submitted to the orchestrator.
    While one is on its way, the front end does not deliver the next output, for up to 5 ms at a time and for at most a
    third of the time overall.
Why:
    Each output that is delivered makes work for the event loop. A new request needs a dozen turns of that loop, and the
    threads that render and tokenize wait for the interpreter lock behind it. With four replicas and 64 streams a
    request took 56 ms to reach the engine, of 213 ms to its first audio. With upstream's slower front end it took
    11 ms. The outputs that wait meanwhile are mostly single tokens.
Why not a hook:
    Upstream has none between the socket and the engine, and its drain of outputs is a closure.
Scope:
    Event loop of the API server, both modes. POST requests for chat, completions, responses, messages, speech and
    transcriptions. Images, videos, web sockets, ``/metrics``, ``/health``, other applications in the process and
    requests of a library user never count, nor does a body that is not complete or a request without a valid API key. A
    request that has not reached the orchestrator after 0.25 s stops counting, so that a remote file or a paused engine
    delays no outputs.
Fragility:
    Only timing changes. Every wrapped function runs once, unchanged. Its arguments are its own, except that the
    application's ``receive`` is observed. A drain that is cancelled in a pause has taken no output. A request stops
    counting in ``finally``, whether it was submitted, refused, failed, cancelled or left by its client. vLLM-Omni's
    application is recognized by ``openai_serving_models`` of its state, which no class declares.
Upstream thread:
    vllm-omni issue #4561 (first audio under load), PR #5221 (event-driven loop).
Remove when:
    Upstream submits requests before it delivers outputs, or in a process of their own.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Reads, Wrap

FASTAPI, API_SERVER = "fastapi.applications", "vllm_omni.entrypoints.openai.api_server"
ENGINE = "vllm_omni.engine.async_omni_engine"
BASE = "vllm_omni.engine.omni_engine_base"


def _fit(release: str, *drains: tuple[str, str]) -> Fit:
    """The row of a release: a request's way in, and the drains of the front end."""
    seams: tuple[AnySeam, ...] = (
        Wrap(FASTAPI, "FastAPI.__call__", wrapper="wrapped_app"),
        Wrap(ENGINE, "AsyncOmniEngine.add_request_async", wrapper="wrapped_add_request_async"),
        Wrap("vllm_omni.engine.orchestrator", "Orchestrator._handle_add_request", wrapper="wrapped_handle_add_request"),
        Reads("vllm_omni.engine.messages", "StageSubmissionMessage", ("request_id",)),
        *(Wrap(module, qualname, wrapper="wrapped_drain") for module, qualname in drains),
    )
    return Fit(
        releases=(release,),
        preview="rc" in release,
        seams=seams,
        of_api_server=(FASTAPI, API_SERVER),
        without_api_server="there is no API server, so no request counts",
    )


def _one_by_one(release: str, module: str, owner: str) -> Fit:
    """The row of a release with a drain of poll mode and one of event-driven mode."""
    return _fit(release, (module, f"{owner}.try_get_output_async"), (module, f"{owner}.get_output_blocking_async"))


PATCH = Patch(
    name="requests_first",
    summary="incoming requests precede the outputs of other requests",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("submitted", "requests handed to the orchestrator", per_request=True),
        Counter("requests", "complete requests for generation, including refused ones"),
        Counter("waits", "pauses of the outputs for requests"),
        Counter("waited_us", "length of these pauses in total, microseconds"),
        Counter("cut_short", "pauses that ended at their limit, before the last request was submitted"),
    ),
    rows=(
        _one_by_one("0.28.0", ENGINE, "AsyncOmniEngine"),
        _one_by_one("0.30.0", BASE, "OmniEngineBase"),
        _fit("0.32.0rc1", (BASE, "OmniEngineBase.get_outputs_async")),
    ),
)
