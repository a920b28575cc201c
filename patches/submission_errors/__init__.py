"""A request that cannot be submitted to a stage fails alone, with a 400.

What:
    Upstream's orchestrator hands a request to its stages, with what ``async_chunk`` announces to later ones. When that
    raises, this request fails through upstream's own helper: its client gets status 400 with the exception's words, its
    stages drop it, and the orchestrator goes on. The same for a companion of a CFG request, whose parent fails, and for
    an update of a streaming-input session. The exception is logged with its traceback, and counted.
Why:
    Upstream itself does this for an ``OverflowError`` alone. Any other exception ends the orchestrator's thread, and
    with it every request of the server and every later one. A speech request whose ``input`` has a lone surrogate
    (U+D800) is enough, because msgpack cannot encode it.
Why not a hook:
    Upstream has none between the queue of requests and a stage, and nothing in front of it knows what can be encoded.
Scope:
    Orchestrator thread of the API server, both modes. ``EngineDeadError`` keeps upstream's meaning, as do errors that
    say nothing about the request: of the operating system, of ZMQ, of memory. An end of the server that a supervisor
    answers with a restart is better there than a server that fails every request. What a stage raises while it computes
    is not covered, nor is an abort.
Fragility:
    Nothing that upstream does changes unless it raises. Read besides what the seams name: ``entry_stage_id`` of a
    message that has one.
Upstream thread:
    vllm-omni issue #2392 (isolation of requests), PR #9470 (release notes of 0.32, not in 0.32.0rc1).
Remove when:
    Upstream fails a request alone whatever its submission raises, in every supported release.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Process, Reads, Wrap

ORCHESTRATOR = "vllm_omni.engine.orchestrator"
MESSAGES = "vllm_omni.engine.messages"
_SUBMISSIONS = ("_handle_add_request", "_handle_streaming_update", "_handle_add_companion")


def _seams(owner: str) -> tuple[AnySeam, ...]:
    """The submissions, and upstream's helper, by the class that has it."""
    submissions = (Wrap(ORCHESTRATOR, f"Orchestrator.{name}", wrapper="wrapped_submission") for name in _SUBMISSIONS)
    return (
        *submissions,
        Call(ORCHESTRATOR, f"{owner}._fail_request_client_error"),
        Reads(MESSAGES, "StageSubmissionMessage", ("request_id",)),
        Reads(MESSAGES, "AddCompanionRequestMessage", ("parent_id",)),
    )


PATCH = Patch(
    name="submission_errors",
    summary="a request that cannot be submitted to a stage fails alone, with a 400",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(Counter("failed_alone", "requests that could not be submitted, and failed alone"),),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("Orchestrator")),
        Fit(releases=("0.30.0",), seams=_seams("OrchestratorBase")),
        Fit(releases=("0.32.0rc1",), preview=True, seams=_seams("OrchestratorBase")),
    ),
)
