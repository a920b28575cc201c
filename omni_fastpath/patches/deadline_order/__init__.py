"""The front end delivers the orchestrator's messages by deadline, first text and first audio at once.

What:
    Takes all messages that are queued between the orchestrator and the front end, and delivers the one with the
    earliest deadline first (EDF). The first text and the first audio of a request are due at once, before anything
    else. Later audio is due when a listener who has played since the first packet would run out of it, but at most 5 s
    after it arrived. Everything else, text included, is due when it arrives. The order within a request never changes.
    If a later message of a request is due first, the messages before it are delivered first.
Why:
    One thread delivers all messages. When the API process is overloaded, thousands of messages are queued for it in
    order of arrival, and most of them are audio that no listener needs for seconds. First audio waits behind them
    (vllm-omni issue #4561, one hop after the place that it describes).
Why not a hook:
    The drain is a closure, and the queue is a janus queue that the orchestrator's thread fills.
Scope:
    Event loop of the API server or of ``AsyncOmni``, in both modes. Complete answers, text without audio, diffusion
    outputs, errors and statistics have no listener, so they are due when they arrive. An acknowledgement belongs to no
    request and is delivered at once. Any other message without a request, for example the error that ends an engine, is
    delivered after everything that arrived before it and before everything that arrived after it. While anything is
    queued, something is delivered. No message waits for one that arrives more than 15 s after it. An output that
    repeats earlier audio (CUMULATIVE, which only library users request) counts that audio again, so that it is due as
    late as audio can be.
Fragility:
    Wraps the engine's drains, whose contract is "a message, or None". Messages are taken from ``output_queue`` with
    janus' own ``get_nowait``, and on 0.32 with upstream's function for that. A queue that is not a janus queue is left
    to upstream. Of a message without a request the class is read. The seconds of audio are computed by the functions
    that upstream uses for its metrics. If they do not find the sample rate, audio is due when it arrives. After an
    error, messages are put back into the ``deque`` inside the janus queue.
Upstream thread:
    vllm-omni issue #4561 (first audio under load), PR #5221 (event-driven loop).
Remove when:
    Upstream's front end delivers first audio before later audio of other requests.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Process, Reads, Wrap

UTILS = "vllm_omni.metrics.utils"
BASE = "vllm_omni.engine.omni_engine_base"
MESSAGES = "vllm_omni.engine.messages"


def _seams(module: str, owner: str, *drains: str) -> tuple[AnySeam, ...]:
    """The drains of an engine, and the functions and attributes with which messages and their audio are read."""
    return (
        *(Wrap(module, f"{owner}.{drain}", wrapper=f"wrapped_{drain.lstrip('_')}") for drain in drains),
        Call(UTILS, "iter_mm_outputs"),
        Call(UTILS, "count_audio_frames"),
        Call("vllm_omni.metrics.definitions", "resolve_audio_sample_rate_or_none"),
        Reads(module, owner, ("output_queue",)),
        Reads(MESSAGES, "OutputMessage", ("request_id", "stage_id", "engine_outputs", "finished")),
        Reads(MESSAGES, "ErrorMessage", ("request_id",)),
    )


_ONE_BY_ONE = ("try_get_output_async", "get_output_blocking_async")  # poll mode, event-driven mode

PATCH = Patch(
    name="deadline_order",
    summary="the front end delivers messages by deadline, first text and first audio at once",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("messages", "messages delivered", per_request=True),
        Counter("overtaken", "messages that were delivered after one that had arrived later"),
        Counter("most_queued", "most messages queued at the front end", is_maximum=True),
    ),
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine", *_ONE_BY_ONE)),
        Fit(releases=("0.30.0",), seams=_seams(BASE, "OmniEngineBase", *_ONE_BY_ONE)),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            seams=_seams(BASE, "OmniEngineBase", "_drain_output_messages"),
        ),
    ),
)
