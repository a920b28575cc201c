"""What an output costs the orchestrator does not grow with its request, and what nothing receives is not built.

What:
    Inter-token latencies are added up when they are read, at a stage's end, and not at each output. A completion copies
    the token ids so far when they are read. In the middle of a request whose outputs nothing receives at a stage, an
    entry that brings only tokens is counted, its tokens are kept, and no output is made: a bare object with the
    request's id goes through upstream's routing, which does nothing with it. Statistics, time stamps and the terminal
    output are upstream's, from the same state. When vLLM's socket reader asks for its next message and one stands in
    the socket, it gets it at once; when none does, it waits without what ``zmq.asyncio`` does for each. After 64
    messages in one go everything else on the event loop gets a turn.
Why:
    Upstream adds up all latencies of a request and copies all of its token ids at each output, so that a request of n
    steps costs n² (an output at step 2,000 up to three times one at step 50). An output of a talker, which nothing
    receives, costs as much as one of a thinker, and a message a future, a callback and four looks at the socket. All of
    it is under the interpreter's lock that the front end waits for.
Why not a hook:
    Upstream has none there; its socket reader is a function inside a method. ``RequestOutputKind.FINAL_ONLY`` for the
    stages that nothing receives from is no substitute: it changes which audio terminal counts as one, and drops the
    time stamps whose differences reach clients.
Scope:
    Orchestrator thread, both loops. Token ids: requests with DELTA. Not built: entries in the middle of a request
    (DELTA or CUMULATIVE, no text, no session, no CFG companion, stream interval 1) at a stage without final output
    whose next stage receives chunks, after its first output with content. An entry with a payload is built, and all
    that follow it: ``forward_gate`` is what keeps payloads away. Not in a subclass of ``Orchestrator`` (duplex), not
    with prefill and decode apart. What hooks see of an output that was not built has no completions. Sockets: not those
    of clients with data parallelism, which the state's reason says.
Fragility:
    Each wrapper calls what it wraps. A processor and a request's state become a subclass's, and the dict of latency
    records one of ours. From 0.30 on, a step in the middle of a request is counted in the processor's stead, and of one
    that brings plain tokens with DELTA the completion is made here; of any other, the state's detokenizer is another
    object while it is made. Audio frames are counted here once the sample rate is known. The bodies are pinned. The
    detokenizers' lists are relied on to grow at their end only, and to lose no more than what came last (0.32, at a
    stop string); a detokenizer that is not known gets upstream's copies. Before a reader starts, its socket gets a
    ``recv_multipart`` of ours as an attribute of its own; the event loop has our callback at the socket's descriptor in
    the place of pyzmq's until the reader's task ends or is cancelled. Set, after an exception of ours that came between
    a text and its output: ``_last_output_text_offset`` of a detokenizer, so that it gives the text again.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream keeps running sums, copies token ids for the terminal output alone, drops outputs that nothing receives
    before they are built, and its reader takes what stands in the socket without a future each.
"""

from __future__ import annotations

from omni_fastpath.declare import Counter, Patch, Process

from .seams import ROWS

PATCH = Patch(
    name="lean_processing",
    summary="an output's cost does not grow with its request; what nothing receives is not built",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("raw_outputs", "raw outputs that it processed", moves_with="vllm:request_success_total"),
        Counter("not_built", "outputs in the middle of a request that nothing receives, which were not built"),
        Counter("messages", "messages taken from the stages' sockets"),
    ),
    rows=ROWS,
)
