"""What the front end does for one request holds up the others less: its summary at the end, its chunks of audio.

What:
    Where statistics are logged (the default of ``vllm serve --omni``), upstream prints up to four tables of each
    request that ends, on the event loop that sends everybody's audio. Upstream's function runs as it is and returns
    what it returns; ``summary`` says what becomes of its text. ``full``: the same text, its tables made with less work.
    ``thread``: the same text, made and written by a thread of its own, in order, at most 256 requests behind; what it
    had to drop stands in the log. ``line``: upstream's ``[OmniTiming]`` line alone, the tables at DEBUG; a request that
    has no such line (aborted, failed) keeps its tables. ``interval``: one line per ``interval_s``, how many requests
    ended and how long they took; the rest at DEBUG.
    ``wav``: one channel of floats becomes a WAV file or 16-bit PCM by numpy, byte for byte what libsndfile makes of it.
Why:
    PrettyTable measures each cell with a library for wide characters: 1 to 4 ms of processor time a request's end,
    under the interpreter's lock, a third of what the front end spends. Requests that end together print together, just
    when the next wave's first audio is due. On another thread PrettyTable would hold the lock as before, and the event
    loop would wait for it up to 5 ms at a time. Hence the lean tables in every mode.
    A WAV file of a chunk costs libsndfile six times what its bytes cost: it opens a file behind callbacks for each.
Why not a hook:
    Upstream offers ``--disable-log-stats`` only, which takes the metrics away as well.
Scope:
    Event loop of the API server, of ``AsyncOmni`` and of duplex sessions; ``Omni`` too. Metrics, gauges, what is
    returned and what clients get are not touched. From 0.32 on ``summary`` changes nothing: upstream itself logs the
    line alone there, the tables at DEBUG. The thread writes later: what a killed process had not written is
    lost, up to 256 requests of it; one that ends writes for a second at the most, and says what is left.
Fragility:
    Wraps ``OrchestratorAggregator.build_and_log_summary``, pinned because tables are told from other records by
    their one argument. ``_format_table`` runs upstream's code with another class for ``PrettyTable``. Cells that are
    not plain ASCII go to PrettyTable itself, and so does everything once a text differs: the first table of each number
    of columns is made by both and compared. With ``thread``, a handler that asks on which thread it runs finds ours.
    ``soundfile.write`` is wrapped for all who call it in the process; everything but finite 32-bit floats of one
    channel into an empty ``BytesIO`` goes on to it, and the first file of each format is made by both and compared.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Every supported release logs one line a request and keeps the tables for DEBUG, and makes PCM with numpy, as 0.32
    does, and WAV too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Replace, Wrap

STATS = "vllm_omni.metrics.stats"


class FrontEndOptions(Options):
    """Values of ``lean_front_end``."""

    summary: Literal["full", "thread", "line", "interval"] = Field(
        default="full",
        description="what is logged when a request ends: upstream's text (full; on a thread of its own: thread), its "
        "[OmniTiming] line with the tables at DEBUG (line), or one line per interval_s for all (interval)",
    )
    interval_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600.0,
        description="seconds that a line stands for with summary: interval",
    )
    wav: bool = Field(
        default=True,
        description="write chunks of audio as WAV or 16-bit PCM without libsndfile, byte for byte the same",
    )


def _summary(body: str) -> AnySeam:
    return Wrap(
        STATS,
        "OrchestratorAggregator.build_and_log_summary",
        ("self",),
        wrapper="wrapped_build_and_log_summary",
        fingerprints=(body,),
    )


_TABLE = ("title", "data", "value_fields", "column_key", "column_prefix")
TABLES: tuple[AnySeam, ...] = (
    Replace(STATS, "_format_table", _TABLE, wrapper="wrapped_format_table", fingerprints=("f25a37a7273d3b78",)),
    # Where it is defined: its code runs.
    Pin("vllm_omni.metrics.utils", "_format_table", _TABLE, fingerprints=("f25a37a7273d3b78",)),
)
_FILE = ("file", "data", "samplerate", "subtype", "endian", "format", "closefd", "compression_level", "bitrate_mode")
FILES = Wrap("soundfile", "write", _FILE, wrapper="wrapped_write")

PATCH = Patch(
    name="lean_front_end",
    summary="what the front end does for one request holds up the others less: its summary, its audio",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=FrontEndOptions,
    default_on=False,
    taken_off="taken_off",
    counters=(
        Counter("requests", "summaries that upstream made under the patch"),
        Counter("tables", "tables made without PrettyTable"),
        Counter("handed_over", "summaries whose records went to the thread that writes them"),
        Counter("left_out", "log records that line and interval left out"),
        Counter("files", "WAV and PCM files made without libsndfile"),
        Counter("dropped", "summaries that were dropped because the log could not keep up"),
    ),
    rows=(
        Fit(releases=("0.22.0", "0.24.0", "0.26.0", "0.28.0"), seams=(_summary("8050577d62c4b726"), *TABLES, FILES)),
        Fit(releases=("0.30.0",), seams=(_summary("8a380533a4be5430"), *TABLES, FILES)),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            seams=(FILES,),
            note="wav alone, summary and interval_s change nothing: "
            "upstream itself logs one line a request and makes PCM without libsndfile",
        ),
    ),
)
