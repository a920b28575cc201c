"""The front end delivers messages when they arrive, by deadline, in turns, and after requests that are on their way in.

What:
    Waits for the orchestrator's next message instead of polling, and takes the queued one with the earliest deadline: a
    request's first audio at once, later audio when its listener would run out of it (5 s after it arrived at most), all
    else when it arrived, and never out of a request's order. The event loop gets a turn after eight messages. The next
    output waits while a request is on its way in (up to 5 ms at a time, a third of the time overall).
Why:
    One thread delivers all messages and takes in all requests. Poll mode wakes it a thousand times per second, and
    event-driven mode costs two hand-overs of the interpreter lock per message. Under load first audio waits behind
    audio that no listener needs for seconds (vllm-omni issue #4561, one hop later), and a request needs a dozen turns
    of the event loop: with 64 streams it took 56 ms to reach the engine, of 213 ms to its first audio.
Why not a hook:
    The taker is a closure, and the queue is a janus queue that the orchestrator's thread fills.
Scope:
    Event loop of the API server or of ``AsyncOmni``, both modes. Complete answers, text, errors and statistics are due
    when they arrive. A message without a request is delivered at once (an acknowledgement), or neither overtakes nor is
    overtaken (the error that ends an engine). No message waits for one that arrives more than 15 s later. Requests that
    count are POST requests for text or speech with a complete body and a valid API key, for 0.25 s at most.
Fragility:
    Wraps the engine's takers ("a message, or None after checking that the orchestrator lives"). The check remains
    upstream's. ``_put``, ``_get`` and ``_qsize`` of the janus queue are overridden. After an error messages are put
    back into its ``deque``. Another kind of queue is left to upstream. Seconds of audio are computed by upstream's
    functions. Where these find no sample rate, audio is due when it arrives.
Upstream thread:
    vllm-omni issue #4561 (first audio under load), PR #5221 (event-driven mode), PR #3690 (shorter sleep, closed).
Remove when:
    Upstream's front end waits for messages on its event loop, delivers first audio before later audio of other
    requests, and takes in requests before it delivers outputs.
"""

from __future__ import annotations

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Process, Relies, Replace, Row, State, Wrap

BASE = "vllm_omni.engine.omni_engine_base"


class DeliveryOptions(Options):
    """The values of ``delivery``."""

    by_deadline: bool = Field(default=True, description="first audio at once, later audio before its listener needs it")
    requests_first: bool = Field(default=True, description="pause outputs while a request is on its way in")


def _seams(module: str, owner: str) -> tuple[AnySeam, ...]:
    """The takers of both modes, with what messages and their audio are read, and what is overridden."""
    return (
        Wrap(module, f"{owner}.try_get_output_async", wrapper="wrapped_next"),
        Replace(module, f"{owner}.get_output_blocking_async", wrapper="wrapped_next"),
        Relies(module, owner),
        Relies(module, f"{owner}.is_alive"),
        *(Relies("vllm_omni.metrics.utils", name) for name in ("iter_mm_outputs", "count_audio_frames")),
        Relies("vllm_omni.metrics.definitions", "resolve_audio_sample_rate_or_none"),
        *(Relies("vllm_omni.engine.messages", name) for name in ("OutputMessage", "ErrorMessage")),
        *(Relies("janus", f"Queue.{name}") for name in ("_put", "_get", "_qsize")),
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
        Counter("woken", "waits that a message ended"),
        Counter("requests", "complete requests for generation, including refused ones; 0 without requests_first"),
        Counter("waits", "pauses of the outputs for requests"),
    ),
    options=DeliveryOptions,
    brings=("connections",),
    formerly={old: f"{old} is part of delivery since 0.4; set delivery{key} instead" for old, key in _FORMERLY.items()},
    rows=(
        Fit(releases=("0.28.0",), seams=_seams("vllm_omni.engine.async_omni_engine", "AsyncOmniEngine")),
        Fit(releases=("0.30.0",), seams=_seams(BASE, "OmniEngineBase")),
        Row(
            releases=("0.32.0rc1",),
            state=State.SUPERSEDED,
            note="the front end waits on its event loop, and an order and pauses show no difference there",
            seams=(Relies(BASE, "OmniEngineBase.get_outputs_async"),),
        ),
    ),
)
