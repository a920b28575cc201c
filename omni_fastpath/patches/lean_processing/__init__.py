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
