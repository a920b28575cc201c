"""A request that cannot be submitted to a stage fails alone, with a 400.

What:
    Upstream's orchestrator submits a request to its first stage, and to later ones too: with ``async_chunk`` at once,
    without it when the stage before has its output. If that raises, this request fails through upstream's own helper:
    its client gets status 400 with the text of the exception, its stages drop it, and the orchestrator continues. The
    same applies to a companion of a CFG request, whose parent fails, and to an update of a streaming-input session. The
    exception is logged and counted.
Why:
    Upstream itself does this only for an ``OverflowError`` and some errors of its own. Any other exception ends the
    orchestrator's thread, and with it every running and every later request of the server. A speech request whose
    ``input`` has a lone surrogate (U+D800) is enough, because msgpack cannot encode it. On 0.28 and 0.30 so is one that
    the function between two stages refuses, such as, on 0.30, a Ming-Image request with a ``negative_prompt``.
Why not a hook:
    Upstream has none between the queue of requests and a stage, and nothing in front of it checks what can be encoded.
Scope:
    Orchestrator thread of the API server, both modes. ``EngineDeadError`` keeps its meaning, as do errors that are not
    about the request, such as those of the operating system, of ZMQ and of memory: there it is better that the server
    ends and a supervisor restarts it than that every request fails. Errors that a stage raises while it computes are
    not covered, nor is an abort.
Fragility:
    Nothing changes unless upstream raises. Read besides what the seams name: ``entry_stage_id`` of a message that has
    one.
Upstream thread:
    vllm-omni issue #2392 (isolation of requests), PR #9470 (release notes of 0.32, not in 0.32.0rc1).
Remove when:
    Upstream fails a request alone whatever its submission raises, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
MESSAGES = "vllm_omni.engine.messages"
_HANDLERS = ("_handle_add_request", "_handle_streaming_update", "_handle_add_companion")


def _seams(owner: str) -> tuple[AnySeam, ...]:
    """The handlers of messages, and in the class that has them the submission to a stage and upstream's helper."""
    handlers = (Wrap(ORCHESTRATOR, f"Orchestrator.{name}", wrapper="wrapped_submission") for name in _HANDLERS)
    return (
        *handlers,
        Wrap(ORCHESTRATOR, f"{owner}._dispatch_or_fail_request", wrapper="wrapped_dispatch"),
        Relies(ORCHESTRATOR, f"{owner}._fail_request_client_error"),
        Relies(MESSAGES, "StageSubmissionMessage"),
        Relies(MESSAGES, "AddCompanionRequestMessage"),
    )


PATCH = Patch(
    name="submission_errors",
    summary="a request that cannot be submitted to a stage fails alone, with a 400",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("failed_alone", "requests that could not be submitted, and failed alone"),),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("Orchestrator")),
        Fit(releases=("0.30.0", "0.32.0rc1"), seams=_seams("OrchestratorBase")),
    ),
)
