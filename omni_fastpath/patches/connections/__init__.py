"""Follows a request into the application and to the orchestrator, for the patches that act on it there.

What:
    Tells the patches that use it of each connection to vLLM-Omni's application: when it begins, when one of its
    requests is handed to the orchestrator, and when it ends. By itself it changes nothing.
Why:
    Several patches need these places. An upstream function that is wrapped once costs once, and is put back once.
Why not a hook:
    Upstream has none between the socket and the engine.
Scope:
    API server of ``vllm serve``, and any application that it made. Other applications in the process are passed
    through. In a process without the API server a patch that requires this one still serves, but sees no connection.
Fragility:
    Every wrapped function runs once. Its arguments are its own, except that a patch may observe ``receive`` and
    ``send``. An exception of a patch in between makes only that patch step aside. vLLM-Omni's application is recognized
    by ``openai_serving_models`` of its state, which no class declares.
Upstream thread:
    vllm-omni issue #4561 (first audio under load).
Remove when:
    No patch requires it.
"""

from __future__ import annotations

from omni_fastpath.declare import Counter, Fit, Patch, Process, Wrap

ENGINE = "vllm_omni.engine.async_omni_engine"
FASTAPI, API_SERVER = "fastapi.applications", "vllm_omni.entrypoints.openai.api_server"

PATCH = Patch(
    name="connections",
    summary="follows a request into the application, for the patches that require it",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("followed", "connections to vLLM-Omni's application"),),
    rows=(
        Fit(
            releases=("0.28.0", "0.30.0", "0.32.0rc1"),
            seams=(
                Wrap(FASTAPI, "FastAPI.__call__", wrapper="wrapped_app"),
                Wrap(ENGINE, "AsyncOmniEngine.add_request_async", wrapper="wrapped_add_request_async"),
            ),
            of_api_server=(FASTAPI, API_SERVER),
            without_api_server="there is no API server, so no request is followed",
        ),
    ),
)
