"""Where the API process's time goes during a level: samples of py-spy, by thread and function."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rigs import results, whole_server
from benchmarks.rigs.whole_server import checked
from benchmarks.server import observed, threads
from benchmarks.server.arms import ServerArm
from benchmarks.server.load import Load
from benchmarks.server.measure import api_processes, serving
from omni_fastpath.tools.ab import about

RATE = 200
"""Samples a second."""
SHOWN = 15
ALL_OF_IT = 0.9
"""A function in more of a thread's samples than this says nothing: the loop itself and what runs it."""
PLUMBING = (
    *("asyncio/", "uvloop/", "threading.py", "concurrent/", "contextlib.py", "functools.py", "contextvars.py"),
    *("uvicorn/", "starlette/", "fastapi/", "anyio/", "prometheus_fastapi_instrumentator/"),
)
"""Files whose functions only call others."""
THREADS = {observed.FRONT_END: "front end", observed.ORCHESTRATOR: "orchestrator"}
KINDS = {"holding the lock": ("--gil",), "not idle": ()}
"""What is sampled: threads that hold the interpreter's lock, and those that py-spy does not take for idle,
of which some wait."""

_START_S = 2.0
_STOP_S = 60.0


class NoPySpyError(RuntimeError):
    """There is no py-spy."""


def py_spy() -> str:
    """The command.

    Raises:
        NoPySpyError: There is none.
    """
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise NoPySpyError(f"no py-spy beside this interpreter or on PATH: {sys.executable} -m pip install py-spy")
    return found


@dataclass
class Samples:
    """What py-spy saw.

    Attributes:
        total: Samples of each thread, by its name.
        functions: Of each thread, in how many of its samples a function was, by the function.
        leaves: The same for the function that ran itself.
    """

    total: Counter[str] = field(default_factory=Counter)
    functions: dict[str, Counter[str]] = field(default_factory=dict)
    leaves: dict[str, Counter[str]] = field(default_factory=dict)

    def shares(self, thread: str) -> list[tuple[str, float, float]]:
        """Functions of a thread, the largest first, with their share of its samples: with what they call, and alone.

        Left out is what says nothing: `PLUMBING`, and what is in nearly all of them.
        """
        total = self.total[thread]
        return [
            (name, count / total, self.leaves[thread][name] / total)
            for name, count in self.functions.get(thread, Counter()).most_common()
            if count <= ALL_OF_IT * total and not name.rpartition(" (")[2].startswith(PLUMBING)
        ]


def parse(raw: str) -> Samples:
    """Samples from py-spy's raw format: ``THREAD;FUNCTION (FILE);...;FUNCTION (FILE) COUNT`` a line."""
    found = Samples()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue
        thread, *frames = stack.split(";")
        name = _thread(thread)
        found.total[name] += int(count)
        functions = found.functions.setdefault(name, Counter())
        for frame in set(frames):
            functions[frame] += int(count)
        if frames:
            found.leaves.setdefault(name, Counter())[frames[-1]] += int(count)
    return found


def _thread(frame: str) -> str:
    """Its name in Python: py-spy writes ``thread (ID): NAME`` where it knows it, and the id alone where not."""
    return frame.rpartition(": ")[2]


@contextlib.contextmanager
def sampling(pid: int, options: Sequence[str]) -> Iterator[list[str]]:
    """Sample a process; the list has the raw text afterwards.

    Raises:
        RuntimeError: py-spy failed.
    """
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="py-spy-") as folder:
        path = Path(folder) / "raw"
        command = [py_spy(), "record", "--pid", str(pid), "--rate", str(RATE), "--format", "raw", "--threads"]
        command += ["--nolineno", "--duration", "unlimited", "--output", str(path), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            time.sleep(_START_S)
            try:
                yield found
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    said, _ = process.communicate(timeout=_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    said, _ = process.communicate()
        if not path.exists():
            raise RuntimeError(f"py-spy wrote nothing:\n{said}")
        found.append(path.read_text(encoding="utf-8"))


def run(arms: Sequence[ServerArm], load: Load) -> None:
    """Each arm's server once: the level is asked once for each of `KINDS`, and a table printed for each thread.

    Raises:
        NoPySpyError: There is no py-spy.
    """
    py_spy()
    model = whole_server.model_folder(load.model)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, dict[str, Samples]] = {}
        for arm in arms:
            results.progress(f"profile: {arm.name}")
            found[arm.name] = _profile(arm, load, model, Path(folder) / f"{arm.name}.log")
            results.save("profile", {"arm": arm.name, "load": load, "shares": _plain(found[arm.name])})
    show(found, load)


def _profile(arm: ServerArm, load: Load, model: Path, log: Path) -> dict[str, Samples]:
    found = {}
    with serving(arm, load, model, log) as server:
        pids = api_processes(server)
        total = {pid: sum(used for _, used in of.values()) for pid, of in threads.used(pids).items()}
        pid = max(pids, key=lambda pid: total[pid])
        for kind, options in KINDS.items():
            with sampling(pid, options) as raw:
                for level in load.levels:
                    checked(load.run(server.url, level), audio=True)
            found[kind] = parse(raw[0])
    return found


def _plain(found: Mapping[str, Samples]) -> dict[str, Any]:
    return {
        kind: {
            "threads": dict(samples.total),
            **{shown: samples.shares(thread)[: 4 * SHOWN] for thread, shown in THREADS.items()},
        }
        for kind, samples in found.items()
    }


def show(found: Mapping[str, Mapping[str, Samples]], load: Load) -> None:
    """For each kind, arm and thread: who had the time, and the functions with the largest shares."""
    levels = ", ".join(f"{level:g}" for level in load.levels)
    console = Console(width=150)
    for kind in KINDS:
        for arm, samples in ((arm, kinds[kind]) for arm, kinds in found.items()):
            everything = samples.total.total() or 1
            who = ", ".join(
                f"{THREADS.get(name, name)} {n / everything:.0%}" for name, n in samples.total.most_common(4)
            )
            table = Table(title=f"{arm}, {kind}: {load}, {levels}; {who} of {everything} samples")
            table.add_column("thread")
            table.add_column("function, with what it calls")
            table.add_column("share", justify="right")
            table.add_column("alone", justify="right")
            for thread, shown in THREADS.items():
                for place, (name, share, alone) in enumerate(samples.shares(thread)[:SHOWN]):
                    table.add_row(shown if not place else "", name, f"{share:.1%}", f"{alone:.1%}")
                table.add_section()
            console.print(table)
    print(about.line())
