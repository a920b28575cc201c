"""A token of text costs the front end less on its way into a streamed chat answer.

What:
    Upstream makes four pydantic models for each token that it streams, and a fifth pass over them makes the event's
    text. All but the token and three numbers are the same from event to event of a request. ``tokens``: the events of
    one request are written around them, byte for byte the same; the first of each form is made by both and compared.
    ``unneeded``: where a request wants audio alone, upstream logs one warning for each token of its text. ``each``
    leaves them; ``once`` logs the first, and when the request ends how many there were.
Why:
    Models and their text are a quarter of the front end's processor time in a request of 400 tokens, under the
    interpreter's lock that the orchestrator waits for.
Why not a hook:
    Upstream has none between an output and its event.
Scope:
    ``/v1/chat/completions``, streamed, in the API server. An event of exactly one choice with text, without log
    probabilities, token ids, end or stage metrics, of a request whose id has at most 256 characters; every other
    event, and every event with audio, is upstream's.
    Streams that began under the patch keep it until they end. A library user's process with the block in its deploy
    YAML imports upstream's API server for it.
Fragility:
    ``chat_completion_stream_generator`` is upstream's code object with other globals, in which four classes are ours:
    its body is pinned, and so are what it hands a choice to and how upstream writes a delta (on 0.22 as any model).
    What it makes of them is a real model as soon as anything but its text is asked of it.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Upstream writes an event without building models for it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Replace


class StreamOptions(Options):
    """Values of ``lean_stream``."""

    tokens: bool = Field(
        default=True,
        description="write a token's event without pydantic, byte for byte the same",
    )
    unneeded: Literal["each", "once"] = Field(
        default="each",
        description="the warning for an output that its request did not ask for: for each, as upstream, or once for a "
        "request, with their number at its end",
    )


UP_TO_0_28 = "vllm.entrypoints.openai.engine.protocol"
FROM_0_30 = "vllm.entrypoints.generate.base.protocol"
FILTERS = "vllm.entrypoints.serve.utils.tool_calls_utils"


def _stream(body: str, *others: str, counts: bool = False) -> AnySeam:
    """Upstream's generator; with ``counts`` it is told the tokens of each kind of input."""
    given = ("self", "request", "result_generator", "request_id", "model_name", "conversation", "tokenizer")
    more = ("request_metadata", "reasoning_parser", *(("mm_token_counts",) if counts else ()), "raw_request")
    return Replace(
        "vllm_omni.entrypoints.openai.serving_chat",
        "OmniOpenAIServingChat.chat_completion_stream_generator",
        (*given, *more),
        wrapper="wrapped_chat_completion_stream_generator",
        fingerprints=(body, *others),
    )


def _delta(module: str) -> AnySeam:
    """How a delta is written: text that has another form for some tokens would be seen only if it were the first."""
    return Pin(module, "DeltaMessage._serialize", ("self", "handler"), fingerprints=("392ff922e8ecca07",))


def _filter(module: str, given: str, body: str) -> AnySeam:
    """The one call that is given our choice: it must leave it as it is."""
    return Pin(module, "maybe_filter_parallel_tool_calls", (given, "request"), fingerprints=(body,))


FILTER = _filter(FILTERS, "choice", "855a148a4fdacb13")

PATCH = Patch(
    name="lean_stream",
    summary="a token's event in a streamed chat answer is written with less work",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=StreamOptions,
    default_on=False,
    taken_off="taken_off",
    counters=(
        Counter("streams", "streamed chat answers that began under the patch"),
        Counter("events", "events written without pydantic"),
        Counter("left_out", "warnings for an output that nobody asked for that were counted instead"),
    ),
    rows=(
        # A delta has no serializer of its own there yet.
        Fit(
            releases=("0.22.0",),
            seams=(
                _stream("72e8d1caa480ed3a"),
                _filter("vllm.entrypoints.openai.utils", "choice", "e06a0a8857d9e115"),
            ),
        ),
        Fit(
            releases=("0.24.0", "0.26.0"),
            seams=(_stream("fe9a5586b494251c", "c9c26f832d2b2833"), _delta(UP_TO_0_28), FILTER),
        ),
        Fit(releases=("0.28.0",), seams=(_stream("c816f59710f98d6f", counts=True), _delta(UP_TO_0_28), FILTER)),
        Fit(releases=("0.30.0",), seams=(_stream("c816f59710f98d6f", counts=True), _delta(FROM_0_30), FILTER)),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            seams=(
                _stream("efb8c9944cc24102", counts=True),
                _delta(FROM_0_30),
                _filter(FILTERS, "item", "ba2fa8ea010adca5"),
            ),
        ),
    ),
)
