"""Less work of the front end per request: for the summary in the log and for audio.

What:
    Where statistics are logged (the default of ``vllm serve``), upstream prints up to four tables for each request that
    ends. With ``summary: full`` the same text is made with less work. With ``summary: line`` only upstream's
    ``[OmniTiming]`` line is logged, and the tables at DEBUG. One channel of floats becomes a WAV file or 16-bit PCM by
    numpy, byte for byte as libsndfile writes it.
Why:
    PrettyTable measures each cell with a library for wide characters: 1 to 4 ms of processor time per request on the
    event loop that sends all audio, a third of the front end's time. libsndfile takes six times as long for a chunk's
    WAV file as writing its bytes does, because it opens a file behind callbacks.
Why not a hook:
    Upstream only offers ``--disable-log-stats``, which removes the metrics as well.
Scope:
    Event loop of the API server, of ``AsyncOmni`` and of duplex sessions, and ``Omni``. Metrics, return values and what
    clients receive are not changed. From 0.32 on ``summary`` changes nothing, because upstream itself logs only the
    line, and the tables at DEBUG.
Fragility:
    ``_format_table`` is upstream's code object with another class for ``PrettyTable``, which still makes tables that
    are not plain ASCII. The first table for each number of columns and the first file of each format are made both
    ways: a difference makes the state ``failed``. ``soundfile.write`` is wrapped for every caller in the process, and
    still writes everything but finite 32-bit floats of one channel into an empty ``BytesIO``.
Upstream thread:
    vllm-omni issue #4561 (the CPU-side output path).
Remove when:
    Every supported release logs one line per request, and makes PCM, as 0.32 does, and WAV with numpy.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Process, Relies, Replace, Wrap

STATS = "vllm_omni.metrics.stats"


class FrontEndOptions(Options):
    """Values of ``lean_front_end``."""

    summary: Literal["full", "line"] = Field(
        default="full",
        description="what is logged when a request ends: its tables (full), or only a line (line)",
    )


TABLES: tuple[AnySeam, ...] = (
    Relies(STATS, "OrchestratorAggregator.build_and_log_summary"),
    Replace(STATS, "_format_table", wrapper="wrapped_format_table"),
    # Where it is defined, because its code runs.
    Relies("vllm_omni.metrics.utils", "_format_table"),
)
"""Upstream's tables, and the body that logs them."""


WRITE = Wrap("soundfile", "write", wrapper="wrapped_write")

PATCH = Patch(
    name="lean_front_end",
    summary="less work of the front end for summaries in the log and for audio",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    options=FrontEndOptions,
    counters=(
        Counter("files", "WAV and PCM files made without libsndfile"),
        Counter("tables", "tables made without PrettyTable"),
        Counter("left_out", "tables that were not logged because of summary: line"),
    ),
    rows=(
        Fit(releases=("0.28.0", "0.30.0"), seams=(WRITE, *TABLES)),
        Fit(
            releases=("0.32.0rc1",),
            seams=(WRITE,),
            note="summary has no effect, because upstream itself logs one line per request",
        ),
    ),
)
