"""What a program shares with another that starts stock and fastpath in turn and shows them side by side."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from benchmarks.rigs.bench import BenchError
from benchmarks.rigs.capture import Capture, answers_differ
from benchmarks.rigs.phases import Phases
from benchmarks.rigs.rows import Row
from benchmarks.rigs.server import Server, ServerError
from omni_fastpath.compare import verdict
from omni_fastpath.compare.arm import WrongArmError

_PIPED_WIDTH = 200
_LONGEST_FOLDER = 60  # a Unix socket's path has 107 characters, of which upstream's own names take 37

Answers = Sequence[Mapping[str, Any]]
"""What the requests of a start were answered, as `Capture.answer` says it, in the order of the requests."""


class MeasureError(RuntimeError):
    """A measurement could not be made; its message says which."""


# ---- The program ----


def guarded(name: str, run: Callable[[Console], int]) -> int:
    """Run a program's body with a console of its own, so that whatever ends it leaves no server behind.

    Args:
        name: What the program is called in a sentence.
        run: Its body: from the console to the exit status.

    Returns:
        The body's status; 1 where it could not measure, 130 where it was interrupted.
    """
    console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=_PIPED_WIDTH, no_color=True)
    # SIGINT too: where a shell started this in the background, Python leaves it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        return run(console)
    except SystemExit:
        console.print("Interrupted; the server is stopped and its files are removed.")
        return 130
    except (WrongArmError, ServerError, BenchError, MeasureError, subprocess.CalledProcessError) as error:
        console.print(f"{name} has no table to show.", style="bold red")
        detail = f"\n{error.output}" if isinstance(error, subprocess.CalledProcessError) else ""
        console.print(f"{type(error).__name__}: {error}{detail}", markup=False, highlight=False)
        return 1


def _interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def positive(text: str) -> int:
    """A number of one or more, of a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: 1 or more")
    return number


def plan(name: str, command: str, starts: Sequence[str], minutes_a_start: float) -> list[str]:
    """What is about to run, how long it takes, and whether it can decide anything.

    Args:
        name: What the program is called in a sentence.
        command: That runs it.
        starts: The arm of each start, in order.
        minutes_a_start: On two cores.
    """
    said = f"{name} starts {len(starts)} servers, one after another: {', '.join(starts)}."
    lines = [f"{said} On two cores it takes about {minutes_a_start * len(starts):.0f} minutes."]
    fewest, enough = min(starts.count(arm) for arm in set(starts)), verdict.STARTS
    if fewest < verdict.starts_for(0):
        minutes = minutes_a_start * 2 * enough
        lines.append(
            f"It shows both arms side by side; so few starts cannot tell a difference from luck. "
            f"`{command} --starts {enough}` can, in some {minutes:.0f} minutes."
        )
    return lines


# ---- A start ----


@contextlib.contextmanager
def work_folder(prefix: str) -> Iterator[Path]:
    """A folder whose path is short enough for the sockets in it, removed at the end."""
    here = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=here if len(here) <= _LONGEST_FOLDER else "/tmp") as folder:  # noqa: S108
        yield Path(folder)


def write_model(folder: Path) -> Path:
    """Qwen3-Omni's model folder in *folder*, by a process of its own, which takes the memory of its imports with it."""
    model = folder / "model"
    command = [sys.executable, "-m", "omni_simulated_device.models", "qwen3_omni", str(model)]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    return model


@contextlib.contextmanager
def served(server: Server, title: str, processes: str, phases: Phases) -> Iterator[Server]:
    """The server from its start to its stop, whatever happens.

    Args:
        server: Not started yet.
        title: Of the start.
        processes: What is started, in words.
        phases: Where that is told.

    Raises:
        MeasureError: It ended meanwhile; with the end of its log.
    """
    try:
        with phases.phase(f"{title}: starting {processes}"):
            server.start()
        yield server
    except Exception as error:
        if not server.alive() and server.start_s is not None:
            raise MeasureError(f"{error}\nthe server ended; the end of its log:\n{tail(server.log_path)}") from error
        raise
    finally:
        with phases.phase(f"{title}: stopping"):
            server.stop()


def succeeded(what: str, captures: Sequence[Capture]) -> Sequence[Capture]:
    """The captures, if all requests were answered to their end.

    Raises:
        MeasureError: One was not.
    """
    bad = [capture for capture in captures if not capture.succeeded]
    if bad:
        raise MeasureError(f"{what}: {len(bad)} of {len(captures)} requests failed, the first with {bad[0].error}")
    return captures


def tail(log: Path, lines: int = 40) -> str:
    """The end of a log."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({error})"


# ---- What both arms answered ----


def compare(starts: Sequence[tuple[str, Answers]]) -> dict[str, Any]:
    """Whether every start answered as the first one did, request by request: text, tokens, audio, usage, end.

    Args:
        starts: Arm and answers of each, in the order of running.
    """
    (arm, first), *others = starts
    found = [
        f"start {place} ({other}) against start 1 ({arm}): {line[:300]}"
        for place, (other, answers) in enumerate(others, 2)
        for line in answers_differ(answers, first)
    ]
    return {
        "starts": len(starts),
        "requests": len(first),
        "comparisons": len(first) * len(others),
        "failed": sum(answer["status"] != 200 or bool(answer["error"]) for _, all_of in starts for answer in all_of),
        "audio_bytes": sum(answer["audio_bytes"] for answer in first),
        "differences": found,
    }


def parity_line(parity: Mapping[str, Any]) -> str:
    """What the comparison of the answers says, in a sentence."""
    if parity["differences"]:
        return (
            f"THE ARMS DID NOT ANSWER ALIKE: {len(parity['differences'])} differences in {parity['comparisons']} "
            f"comparisons; the first: {parity['differences'][0]}"
        )
    return (
        f"Answers: {parity['requests']} requests in each of {parity['starts']} starts, {parity['comparisons']} "
        f"comparisons with the first start: byte-identical text and audio ({parity['audio_bytes'] / 1e6:.1f} MB of "
        f"audio a start); {parity['failed']} failed."
    )


# ---- The table on a terminal ----


def print_table(
    console: Console, columns: Sequence[str], found: Sequence[Row], cells: Callable[[Row], Sequence[str]]
) -> None:
    """The rows in their groups, coloured by their verdicts; *cells* has one for each of the columns."""
    table = Table(box=None if not console.is_terminal else Table().box, padding=(0, 1))
    for place, name in enumerate(columns):
        last = name == "verdict"
        table.add_column(name, justify="left" if place == 0 or last else "right", no_wrap=not console.is_terminal)
    group = ""
    for row in found:
        if row.measure.group != group:
            group = row.measure.group
            table.add_section()
            table.add_row(group, style="bold")
        style = {"better": "green", "worse": "red"}.get(row.verdict.word) if row.verdict is not None else None
        table.add_row(*(f"  {cell}" if place == 0 else cell for place, cell in enumerate(cells(row))), style=style)
    console.print(table)
