"""The cost of an output does not grow with its request, and outputs that nothing receives are not built.

What:
    Inter-token latencies are summed when they are read, at a stage's end, and not for each output. A completion of
    plain text copies the token ids so far when they are read. In the middle of a request whose outputs nothing receives
    at a stage, an entry with only tokens is counted, its tokens are kept, and no output is made. A bare object with the
    request's id passes through upstream's routing, which does nothing with it. Statistics, time stamps and the terminal
    output are upstream's, made from the same state.
Why:
    Upstream sums all latencies of a request and copies all of its token ids for each output, so that a request of n
    steps costs n² (an output at step 2,000 up to three times one at step 50). An output of a talker, which nothing
    receives, costs as much as one of a thinker. All of this is done under the interpreter lock, for which the front end waits.
Why not a hook:
    Upstream has none there. ``RequestOutputKind.FINAL_ONLY`` for
    stages from which nothing receives is no substitute, because it changes which audio terminal counts as one and drops
    the time stamps whose differences reach clients.
Scope:
    Orchestrator thread, both loops. Token ids: DELTA and one choice, without log probabilities or payload. Not built:
    entries in the middle of a request (DELTA or CUMULATIVE, no text, no session, no CFG companion, stream interval 1)
    at a stage without final output whose next stage receives chunks, after its first output with content. An entry with
    a payload is built, and so are all that follow it. ``forward_gate`` keeps payloads away. A subclass of
    ``Orchestrator`` (duplex), and prefill and decode in separate stages, are left to upstream. Hooks see an output that
    was not built without completions.
Fragility:
    Each wrapper calls what it wraps. The class of a processor and of a request's state becomes a subclass, and the dict
    of latency records is replaced. From 0.30 on, the patch counts a step in the middle of a request in place of the
    processor. It makes the completion of a step with plain tokens and DELTA itself. These bodies are pinned. The lists of detokenizers must only grow at their end, and lose no
    more than what was added last (0.32, at a stop string). With an unknown detokenizer, completions have upstream's
    copies. Set
    after an exception of the patch between a text and its output: ``_last_output_text_offset`` of a detokenizer, so
    that it returns the text again.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream keeps running sums, copies token ids only for the terminal output, and drops outputs that nothing
    receives before they are built.
"""

from __future__ import annotations

from omni_fastpath.declare import Counter, Patch, Process

from .seams import ROWS

PATCH = Patch(
    name="lean_processing",
    summary="an output's cost does not grow with its request, and what nothing receives is not built",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("raw_outputs", "raw outputs that were processed"),
        Counter("not_built", "outputs in the middle of a request that nothing receives, which were not built"),
    ),
    rows=ROWS,
)
