"""The cost of an output does not grow with its request, and outputs that nothing receives are not built.

What:
    Inter-token latencies are summed at a stage's end, and a completion of plain text copies the token ids so far when
    they are read, instead of both for each output. In the middle of a request whose outputs nothing receives at a
    stage, an entry with only tokens is counted, its tokens are kept, and a bare object with the request's id passes
    through upstream's routing in place of an output. Statistics, time stamps and the terminal output are upstream's.
Why:
    Upstream sums all latencies and copies all token ids of a request for each output, so n steps cost n² (an output
    at step 2,000 up to three times one at step 50), and a talker's output, which nothing receives, costs as much as a
    thinker's. All of it is done under the interpreter lock, for which the front end waits.
Why not a hook:
    Upstream has none there. ``RequestOutputKind.FINAL_ONLY`` is no substitute, because it changes which audio terminal
    counts as one, and drops time stamps whose differences reach clients.
Scope:
    Orchestrator thread, both loops. Token ids: DELTA and one choice, without log probabilities or payload. Not built:
    tokens without text of a request without session or companion, after its first output and until it has a payload, at
    a stage without final output whose next stage receives chunks (``forward_gate`` keeps payloads away). A duplex
    orchestrator, and prefill and decode apart, are left to upstream. Hooks see such an output without completions.
Fragility:
    The class of a processor and of a request's state becomes a subclass, and the dict of latency records is replaced.
    From 0.30 on the patch itself counts a plain step, and makes its completion (bodies pinned). The lists of
    detokenizers must only grow at their end, and lose no more than what was added last. An unknown detokenizer gets
    upstream's copies. Set after an exception: ``_last_output_text_offset``, so that a text is returned again.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream keeps running sums, copies token ids only for the terminal output, and drops outputs that nothing
    receives before they are built.
"""

from __future__ import annotations

from collections.abc import Iterator

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Wrap

OMNI_PROCESSOR = "vllm_omni.outputs.output_processor"
PROCESSOR = "vllm.v1.engine.output_processor"
DETOKENIZER = "vllm.v1.engine.detokenizer"
ORCHESTRATOR = "vllm_omni.engine.orchestrator"


def _methods(module: str, owner: str, names: str) -> Iterator[Relies]:
    return (Relies(module, f"{owner}.{name}") for name in names.split())


def _seams(owner: str, intercept: str) -> tuple[AnySeam, ...]:
    """The seams on every release.

    Args:
        owner: The orchestrator's class.
        intercept: The method that it calls for an output before routing it.
    """
    stats = "_update_stats_from_output _update_stats_from_finished pop_native_text_metrics"
    states = "make_request_output _new_completion_output _new_request_output"
    return (
        # Which outputs are received, and how others are handled.
        Wrap(ORCHESTRATOR, f"{owner}.__init__", wrapper="wrapped_orchestrator_made"),
        Relies(ORCHESTRATOR, owner),
        Relies(ORCHESTRATOR, "OrchestratorRequestState"),
        *_methods(ORCHESTRATOR, owner, f"_handle_processed_outputs _route_output {intercept}"),
        *_methods(ORCHESTRATOR, owner, "_stage_receives_async_chunks"),
        *_methods("vllm_omni.engine.cfg_companion_tracker", "CfgCompanionTracker", "is_companion has_companions"),
        Relies("vllm_omni.engine.stage_pool", "StagePool"),
        # How an entry is handled, apart from making an output, and where a record of latencies grows and ends.
        Wrap(OMNI_PROCESSOR, "MultimodalOutputProcessor.process_outputs", wrapper="wrapped_process_outputs"),
        Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor"),
        *_methods(OMNI_PROCESSOR, "MultimodalOutputProcessor", stats),
        Relies(PROCESSOR, "OutputProcessor.process_outputs"),
        Relies("vllm_omni.engine", "OmniEngineCoreOutput"),
        # How an output is made, the state that changes then, and the source of its token ids and of its text.
        Relies(OMNI_PROCESSOR, "OmniRequestState"),
        *_methods(OMNI_PROCESSOR, "OmniRequestState", states),
        *_methods(PROCESSOR, "RequestState", "_new_completion_output _new_request_output"),
        *_methods(DETOKENIZER, "IncrementalDetokenizer", "update num_output_tokens get_next_output_text"),
        *_methods(DETOKENIZER, "BaseIncrementalDetokenizer", "update get_next_output_text"),
        *_methods(DETOKENIZER, "SlowIncrementalDetokenizer", "num_output_tokens"),
        *(Relies("vllm.outputs", name) for name in ("CompletionOutput", "RequestOutput.__init__")),
    )


_FROM_0_30 = (
    *_seams("OrchestratorBase", "_intercept_stage_output"),
    # The bodies whose work the patch does for a step in the middle of a request. On 0.28 upstream does it.
    Relies("vllm.v1.metrics.stats", "IterationStats.update_from_output"),
    Relies(OMNI_PROCESSOR, "MultimodalOutputProcessor._native_text_metric_record"),
    Relies(OMNI_PROCESSOR, "_accumulate_segment_tpot"),
)

PATCH = Patch(
    name="lean_processing",
    summary="an output's cost does not grow with its request, and what nothing receives is not built",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("raw_outputs", "raw outputs that were processed"),
        Counter("not_built", "outputs in the middle of a request that nothing receives, which were not built"),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("Orchestrator", "_duplex_output_decision")),
        Fit(releases=("0.30.0", "0.32.0rc1"), seams=_FROM_0_30),
    ),
)
