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
    its body is pinned, and so are what it hands a choice to and how upstream writes a delta. What it makes of them is
    a real model as soon as anything but its text is asked of it.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Upstream writes an event without building models for it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import Counter, Fit, Options, Patch, Pin, Process, Replace


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
        Fit(
            releases=("0.30.0",),
            seams=(
                Replace(
                    "vllm_omni.entrypoints.openai.serving_chat",
                    "OmniOpenAIServingChat.chat_completion_stream_generator",
                    (
                        "self",
                        "request",
                        "result_generator",
                        "request_id",
                        "model_name",
                        "conversation",
                        "tokenizer",
                        "request_metadata",
                        "reasoning_parser",
                        "mm_token_counts",
                        "raw_request",
                    ),
                    wrapper="wrapped_chat_completion_stream_generator",
                    fingerprints=("c816f59710f98d6f",),
                ),
                # A text that has another form for some tokens would be seen only if it were the first.
                Pin(
                    "vllm.entrypoints.generate.base.protocol",
                    "DeltaMessage._serialize",
                    ("self", "handler"),
                    fingerprints=("392ff922e8ecca07",),
                ),
                # The one call that is given our choice: it must leave alone what is no model.
                Pin(
                    "vllm.entrypoints.serve.utils.tool_calls_utils",
                    "maybe_filter_parallel_tool_calls",
                    ("choice", "request"),
                    fingerprints=("855a148a4fdacb13",),
                ),
            ),
        ),
    ),
)
