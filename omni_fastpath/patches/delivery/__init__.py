"""The front end delivers messages when they arrive, by deadline, in turns, and after requests that are on their way in.

What:
    Waits for the orchestrator's next message instead of polling, up to 0.25 s. Takes all messages that are queued, and
    delivers the one with the earliest deadline first (EDF): the first audio of a request at once, later audio when a
    listener who has played since the first packet would run out of it, but at most 5 s after it arrived, and everything
    else, text included, when it arrived. The order within a request never changes. If a later
    message of a request is due first, the messages before it are delivered first. The event loop gets a turn after
    every eight messages. While a request is on its way in, from the end of its body until it is handed to the
    orchestrator, the next output waits, for up to 5 ms at a time and for at most a third of the time overall.
Why:
    One thread delivers all messages, and takes in all requests. In poll mode each message waits half a millisecond on
    average, and an idle server wakes a thousand times per second. The thread of event-driven mode costs two hand-overs
    of the interpreter lock per message. When the API process is overloaded, thousands of messages are queued in order
    of arrival, most of them audio that no listener needs for seconds, and first audio waits behind them (vllm-omni
    issue #4561, one hop later). A new request needs a dozen turns of the event loop and threads that want the lock:
    with 64 streams it took 56 ms to reach the engine, of 213 ms to its first audio.
Why not a hook:
    The drain is a closure, and the queue is a janus queue that the orchestrator's thread fills.
Scope:
    Event loop of the API server or of ``AsyncOmni``, in both modes. The synchronous ``Omni`` waits by itself. Complete
    answers, text without audio, diffusion outputs, errors and statistics are due when they arrive. An acknowledgement
    belongs to no request and is delivered at once. Any other message without a request, for example the error that ends
    an engine, is delivered after everything that arrived before it and before everything that arrived after it. No
    message waits for one that arrives more than 15 s after it. An output that repeats earlier audio (CUMULATIVE, which
    only library users request) is due as late as audio can be. Requests that count are POST requests for chat,
    completions, responses, messages, speech and transcriptions, with a complete body and a valid API key. One that
    takes longer than 0.25 s stops counting, so that a remote file or a paused engine delays no outputs. ``by_deadline``
    and ``requests_first`` switch off the order and the pauses.
Fragility:
    Wraps the engine's drains, whose contract is "a message, or None after checking that the orchestrator lives". The
    check remains upstream's. In event-driven mode the drain of poll mode makes it. Arrivals are noticed in
    ``janus.Queue._put``, and messages are taken with janus' ``get_nowait``, on 0.32 with upstream's function for that.
    After an error they are put back into the ``deque`` inside the janus queue. An engine with another kind of queue is
    left to upstream. Of a message without a request the class is read. The seconds of audio are computed by the
    functions that upstream uses for its metrics. If they do not find the sample rate, audio is due when it arrives.
Upstream thread:
    vllm-omni issue #4561 (first audio under load), PR #5221 (event-driven mode, merged in 0.28), PR #3690 (shorter
    sleep, closed).
Remove when:
    Upstream's front end waits for messages on its event loop, delivers first audio before later audio of other
    requests, and takes in requests before it delivers outputs.
"""

from __future__ import annotations

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Process, Relies, Replace, Wrap

UTILS = "vllm_omni.metrics.utils"
BASE = "vllm_omni.engine.omni_engine_base"
MESSAGES = "vllm_omni.engine.messages"


class DeliveryOptions(Options):
    """The values of ``delivery``."""

    by_deadline: bool = Field(default=True, description="first audio at once, later audio before its listener runs out of it")
    requests_first: bool = Field(default=True, description="pause outputs while a request is on its way in")


def _seams(module: str, owner: str, *drains: AnySeam) -> tuple[AnySeam, ...]:
    """The drains of an engine, and the functions and attributes with which messages and their audio are read."""
    return (
        *drains,
        Relies(UTILS, "iter_mm_outputs"),
        Relies(UTILS, "count_audio_frames"),
        Relies("vllm_omni.metrics.definitions", "resolve_audio_sample_rate_or_none"),
        Relies(module, owner),
        Relies(MESSAGES, "OutputMessage"),
        Relies(MESSAGES, "ErrorMessage"),
    )


def _one_by_one(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The seams of a release with a drain of poll mode and one of event-driven mode."""
    return _seams(
        module,
        owner,
        Wrap(module, f"{owner}.try_get_output_async", wrapper="wrapped_try_get_output_async"),
        Replace(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_get_output_blocking_async"),
        Relies("janus", "Queue._put"),
        Relies("janus", "Queue._put_internal"),
    )


_FORMERLY = {"final_output_wakeup": "", "deadline_order": ".by_deadline", "requests_first": ".requests_first"}

PATCH = Patch(
    name="delivery",
    summary="the front end delivers messages at once, by deadline, and after incoming requests",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    counters=(
        Counter("messages", "messages delivered"),
        Counter("overtaken", "messages that were delivered after one that had arrived later"),
        Counter("most_queued", "most messages queued at the front end", is_maximum=True),
        Counter("woken", "waits that a message ended"),
        Counter("requests", "complete requests for generation, including refused ones"),
        Counter("waits", "pauses of the outputs for requests"),
        Counter("waited_us", "length of these pauses in total, microseconds"),
    ),
    options=DeliveryOptions,
    brings=("connections",),
    formerly={name: f"{name} is part of delivery since 0.4; set delivery{key} instead" for name, key in _FORMERLY.items()},
    rows=(
        Fit(releases=("0.28.0",), seams=_one_by_one("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_one_by_one(BASE, "OmniEngineBase")),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            note="upstream's front end waits on its event loop by itself, so only order and pauses are the patch's",
            seams=_seams(
                BASE,
                "OmniEngineBase",
                Wrap(BASE, "OmniEngineBase.get_outputs_async", wrapper="wrapped_get_outputs_async"),
                Wrap(BASE, "OmniEngineBase._drain_output_messages", wrapper="wrapped_drain_output_messages"),
            ),
        ),
    ),
)
