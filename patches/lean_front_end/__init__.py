"""What the front end does for one request holds up the others less: its summary, its tokens' events, its audio.

What:
    Summary: where statistics are logged (the default of ``vllm serve``), upstream prints up to four tables of each
    request that ends, on the event loop that sends all audio. With ``summary: full`` the same text is made with less
    work. With ``summary: line`` upstream's ``[OmniTiming]`` line is written alone, the tables go to DEBUG.
    Events: upstream makes four pydantic models for each token that it streams, and a fifth pass over them makes the
    event's text. All but the token and three numbers are the same from event to event of a request: the text is written
    around them, byte for byte the same, and the models are made without validation.
    Audio: one channel of floats becomes a WAV file or 16-bit PCM by numpy, byte for byte what libsndfile makes of it.
Why:
    PrettyTable measures each cell with a library for wide characters: 1 to 4 ms of processor time a request's end,
    under the interpreter's lock, a third of what the front end spends. Requests that end together print together, just
    when the next wave's first audio is due. Models and their text are a quarter of the front end's time in a request of
    400 tokens. A WAV file of a chunk costs libsndfile six times what its bytes cost: it opens a file behind callbacks.
Why not a hook:
    Upstream offers ``--disable-log-stats`` only, which takes the metrics away as well, and nothing between an output
    and its event.
Scope:
    Event loop of the API server, of ``AsyncOmni`` and of duplex sessions; ``Omni`` too. Metrics, what is returned and
    what clients get are not touched. From 0.32 on ``summary`` changes nothing: upstream itself logs the line alone, the
    tables at DEBUG. Events are those of ``/v1/chat/completions``, streamed, of exactly one choice with text, without
    log probabilities, token ids, end or stage metrics, of a request whose id has at most 256 characters; every other
    event is upstream's. A process that is not ``vllm serve`` and does not import upstream's API server goes without
    this part. Streams that began under the patch keep it until they end.
Fragility:
    ``_format_table`` and ``chat_completion_stream_generator`` are upstream's code objects with other globals: another
    class for ``PrettyTable``, others for the four models. Bodies are pinned, as are what a choice is handed to and how
    a delta is written. Cells that are not plain ASCII go to PrettyTable itself. The first table of each number of
    columns, the first event of each form and the first file of each format are made by both and compared; a difference
    or an exception of ours makes the patch ``failed``, and upstream works alone. ``soundfile.write`` is wrapped for all
    who call it in the process; everything but finite 32-bit floats of one channel into an empty ``BytesIO`` goes on.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Every supported release logs one line a request, writes an event without building models, and makes PCM, as 0.32
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
    # Where it is defined: its code runs.
    Pin("vllm_omni.metrics.utils", "_format_table"),
)
"""Upstream's tables, and the body that logs them."""


def _fit(release: str, deltas: str, *tables: AnySeam, note: str = "") -> Fit:
    """What a release needs, by the module of its delta model."""
    stream = "OmniOpenAIServingChat.chat_completion_stream_generator"
    return Fit(
        releases=(release,),
        preview="rc" in release,
        note=note,
        seams=(
            Wrap("soundfile", "write", wrapper="wrapped_write"),
            *tables,
            Replace(CHAT, stream, wrapper="wrapped_chat_completion_stream_generator"),
            # Text that has another form for some tokens would be seen only if it were the first.
            Pin(deltas, "DeltaMessage._serialize"),
            # The one call that is given a choice.
            Pin(CALLS, "maybe_filter_parallel_tool_calls"),
        ),
        of_api_server=(CHAT, deltas, CALLS),
        without_api_server="upstream's API server is not imported in this process: streamed answers are upstream's",
    )


PATCH = Patch(
    name="lean_front_end",
    summary="what the front end does for one request holds up the others less: summary, events, audio",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=FrontEndOptions,
    taken_off="taken_off",
    counters=(
        Counter("files", "WAV and PCM files made without libsndfile"),
        Counter("events", "events of tokens written without pydantic"),
        Counter("streams", "streamed chat answers that began under the patch"),
        Counter("tables", "tables made without PrettyTable"),
        Counter("left_out", "tables that summary: line left out"),
    ),
    rows=(
        _fit("0.28.0", DELTAS_0_28, *TABLES),
        _fit("0.30.0", DELTAS, *TABLES),
        _fit("0.32.0rc1", DELTAS, note="summary changes nothing: upstream itself logs one line a request"),
    ),
)
