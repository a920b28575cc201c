"""What an output costs the orchestrator does not grow with its request, and what nobody sees is not built.

What:
    Inter-token latencies are added up when they are read, at a stage's end, and not at each output. A completion copies
    the token ids so far when somebody looks at them. Whether an output is a request's first with something in it is
    asked until one was; a sample rate is looked for where one can be found. In the middle of a request that nobody sees
    at a stage, no completion, no request output and no copies are made: a bare object with the request's id goes
    through upstream's routing, which does nothing with it but look whether it is an end. Statistics, time stamps, audio
    frames, text offsets, stop strings, prompt logprobs and the accumulated payload advance as they do on stock, and the
    terminal output is made by upstream from the same state.
Why:
    Upstream adds up all latencies of a request and copies all of its token ids at each output, so that a request of n
    steps costs n² (an output at step 2,000 up to five times one at step 50). An output of a talker, which nobody gets,
    costs as much as one of a thinker. All of it is under the interpreter's lock that the front end waits for.
Why not a hook:
    Upstream has none there. ``RequestOutputKind.FINAL_ONLY`` for the stages that nobody sees is no substitute: it
    changes which audio terminal counts as one, and drops the time stamps whose differences reach clients.
Scope:
    Orchestrator thread, every loop and mode. Requests added while the patch is on. Not built is what stands in the
    middle of a request (DELTA or CUMULATIVE, no session, no CFG companion, no pooling, stream interval 1) at a stage
    without final output whose next stage receives chunks, after its first output with something in it; not in a
    subclass of ``Orchestrator`` (duplex: its plugins look at every output; up to 0.28 where a duplex plane is on), not
    with prefill and decode apart. A payload with audio or a sample rate in it is built as on stock, since statistics
    read it. What hooks see of an output that was not built has no completions. Values are upstream's to the last digit.
    Up to 0.24 latencies and token ids alone are made cheaper, and everything is built; up to 0.28 upstream counts a
    step in the middle of a request.
Fragility:
    Replaces ``record_output_timestamps``. Up to 0.26, where processing stands in the orchestrator's loop, who sees an
    output is found out in ``_handle_kv_ready_raw_outputs``, which the loop calls before. Gives a request's state and a
    stage's processor a subclass, and its records a dict, of ours; counts a step in the middle of a request in words of
    its own; relies on who reads all these, and when. The bodies are pinned. The detokenizers' lists are relied on to
    grow at their end only, and to lose no more than what came last (0.32, at a stop string); a detokenizer that is not
    known gets upstream's copies.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream keeps running sums, copies token ids for the terminal output alone, and drops outputs that nobody sees
    before they are built.
"""

from __future__ import annotations

from omni_fastpath.declare import Counter, Patch, Process

from .rows import ROWS

PATCH = Patch(
    name="lean_processing",
    summary="an output's cost does not grow with its request; what nobody sees is not built",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    default_on=False,
    counters=(
        Counter(
            "requests", "requests of a stage whose outputs it makes cheaper", moves_with="vllm:request_success_total"
        ),
        Counter("not_built", "outputs in the middle of a request that nobody sees, which were not built"),
        Counter("copied", "completions of which somebody looked at all token ids, so that they were copied"),
    ),
    rows=ROWS,
)
