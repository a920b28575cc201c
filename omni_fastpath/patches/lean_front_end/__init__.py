"""Less work of the front end per request: for the summary in the log, for each streamed token and for audio.

What:
    Summary: where statistics are logged (the default of ``vllm serve``), upstream prints up to four tables for each
    request that ends, on the event loop that sends all audio. With ``summary: full`` the same text is made with less
    work. With ``summary: line`` only upstream's ``[OmniTiming]`` line is logged, and the tables are logged at DEBUG.
    Events: upstream makes four pydantic models for each token that it streams, and serializes them into the event's
    text. Within a request only the token and three numbers change from event to event. The patch writes the same text
    around them, byte for byte.
    Audio: one channel of floats becomes a WAV file or 16-bit PCM by numpy, byte for byte as libsndfile writes it.
Why:
    PrettyTable measures each cell with a library for wide characters. This takes 1 to 4 ms of processor time per
    request, under the interpreter lock, which is a third of the front end's time. Requests that end together print
    together, just when the first audio of the next requests is due. Serializing events was 5 % of the front end's time
    in a server with 16 streams of 400 tokens. libsndfile takes six times as long for the WAV file of a chunk as writing
    its bytes does, because it opens a file behind callbacks.
Why not a hook:
    Upstream only offers ``--disable-log-stats``, which removes the metrics as well, and nothing between an output and
    its event.
Scope:
    Event loop of the API server, of ``AsyncOmni`` and of duplex sessions, and ``Omni``. Metrics, return values and what
    clients receive are not changed. From 0.32 on ``summary`` changes nothing, because upstream itself logs only the
    line, and the tables at DEBUG. Events are those of streamed ``/v1/chat/completions`` with exactly one choice with
    text, without log probabilities, token ids, an end or stage metrics, of a request whose id has at most 256
    characters. Every other event is upstream's. A process that is not ``vllm serve`` and does not import upstream's API
    server goes without this part. Streams that began under the patch keep it until they end.
Fragility:
    ``_format_table`` and ``chat_completion_stream_generator`` are upstream's code objects with other globals: another
    class for ``PrettyTable``, and one for an event. Their bodies are pinned, as are the function to which a choice is
    passed and the serializer of a delta. Tables with cells that are not plain ASCII are made by PrettyTable. The first
    table for each number of columns, the first event of each form and the first file of each format are made both ways
    and compared. A difference, or an exception of the patch, makes the state ``failed``, and upstream continues alone.
    ``soundfile.write`` is wrapped for every caller in the process, which still writes everything but finite 32-bit
    floats of one channel into an empty ``BytesIO``.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Every supported release logs one line per request, writes an event without building models, and makes PCM, as 0.32
    does, and WAV with numpy.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Replace, Wrap

STATS = "vllm_omni.metrics.stats"
CHAT = "vllm_omni.entrypoints.openai.serving_chat"
DELTAS_0_28 = "vllm.entrypoints.openai.engine.protocol"
DELTAS = "vllm.entrypoints.generate.base.protocol"
CALLS = "vllm.entrypoints.serve.utils.tool_calls_utils"


class FrontEndOptions(Options):
    """Values of ``lean_front_end``."""

    summary: Literal["full", "line"] = Field(
        default="full",
        description="what is logged when a request ends: upstream's text (full), or its [OmniTiming] line with the "
        "tables at DEBUG (line)",
    )


TABLES: tuple[AnySeam, ...] = (
    Pin(STATS, "OrchestratorAggregator.build_and_log_summary"),
    Replace(STATS, "_format_table", wrapper="wrapped_format_table"),
    # Where it is defined, because its code runs.
    Pin("vllm_omni.metrics.utils", "_format_table"),
)
"""Upstream's tables, and the body that logs them."""


def _fit(release: str, deltas: str, *tables: AnySeam, note: str = "") -> Fit:
    """The row of a release, by the module of its delta model."""
    stream = "OmniOpenAIServingChat.chat_completion_stream_generator"
    return Fit(
        releases=(release,),
        preview="rc" in release,
        note=note,
        seams=(
            Wrap("soundfile", "write", wrapper="wrapped_write"),
            *tables,
            Replace(CHAT, stream, wrapper="wrapped_chat_completion_stream_generator"),
            # Another form of the text for some tokens would be noticed only for the first token.
            Pin(deltas, "DeltaMessage._serialize"),
            # The only function to which a choice is passed.
            Pin(CALLS, "maybe_filter_parallel_tool_calls"),
        ),
        of_api_server=(CHAT, deltas, CALLS),
        without_api_server="upstream's API server is not imported in this process: streamed answers are upstream's",
    )


PATCH = Patch(
    name="lean_front_end",
    summary="less work of the front end for summaries in the log, streamed tokens and audio",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=FrontEndOptions,
    counters=(
        Counter("files", "WAV and PCM files made without libsndfile"),
        Counter("events", "events of tokens written without pydantic"),
        Counter("streams", "streamed chat answers that began under the patch"),
        Counter("tables", "tables made without PrettyTable"),
        Counter("left_out", "tables that were not logged because of summary: line"),
    ),
    rows=(
        _fit("0.28.0", DELTAS_0_28, *TABLES),
        _fit("0.30.0", DELTAS, *TABLES),
        _fit("0.32.0rc1", DELTAS, note="summary has no effect, because upstream itself logs one line per request"),
    ),
)
