"""A start in a file: what was measured, which arm it was of, and where it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath.config import refusal
from omni_fastpath.tools.ab import measures

_PORT = re.compile(r"(?:--port[=\s]+|://[^\s/]+:|(?:localhost|127\.0\.0\.1):)(\d+)")
_NUMBER = re.compile(r"(?<!\d)\d{4,5}(?!\d)")
_HOST = re.compile(r"(--host=|://)[^\s/:]+")
_RESULT = re.compile(r"[^\s=]*(?:/results/[^\s/]+\.json|\.result)\b")
_WORD = 60

SCHEMA = 1
KIND = "omni-fastpath ab start"


class Start(BaseModel):
    """One start of one arm, as its file has it.

    Attributes:
        arm: Its arm's name.
        variables: What made the arm, as a report may show it; empty where a user started the server.
        inherited: What else of this shell's environment may matter to vLLM-Omni and to us; the same in both arms.
        place: Its place in the series, the first is 1.
        about: When, which versions, commit and machine.
        serve: The server's command, as a report may show it; empty where a user started it.
        bench: The client's.
        start_s: From start to ready, seconds; None where a user started it.
        measured: The client's numbers that have a direction, by their key.
        result: Every single number and word of the client's result.
        failed: Requests that failed under the client's load.
        answers: What the fixed requests were answered; empty: none was sent.
        no_answers: In words why none was.
        questions: Digest of the fixed requests; empty in a file of before this was kept.
        simulated: The device is the simulated one.
        states: What the state files of its processes said after the load.
        states_seen: Whether they could be seen from where this ran.
    """

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    kind: str = KIND
    arm: str
    variables: dict[str, str] = {}
    inherited: dict[str, str] = {}
    place: int = 1
    about: dict[str, Any] = {}
    serve: list[str] = []
    bench: list[str] = []
    start_s: float | None = None
    measured: dict[str, float] = {}
    result: dict[str, Any] = {}
    failed: int = 0
    answers: list[dict[str, Any]] = []
    no_answers: str = ""
    questions: str = ""
    simulated: bool = False
    states: list[dict[str, Any]] = []
    states_seen: bool = True

    @property
    def words(self) -> str:
        """What its arm is, in words."""
        own, shells = (" ".join(map("=".join, each.items())) for each in (self.variables, self.inherited))
        if self.serve or own:
            return f"{own or 'no variable of its own'}{f' (from this shell: {shells})' if shells else ''}"
        return "as its server was started"

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(self.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
        new.replace(path)


def read(path: Path) -> Start:
    """The start in a file.

    Raises:
        ConfigError: It is none that this version can read.
    """
    allowed = "a file that `omni-fastpath ab` or `omni-fastpath ab measure` wrote for a start"
    try:
        found = Start.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise refusal(str(path), found=f"no start ({type(error).__name__})", allowed=allowed) from None
    if found.kind != KIND or found.schema_ != SCHEMA:
        raise refusal(str(path), found=f"{found.kind} of schema {found.schema_}", allowed=f"{allowed}, schema {SCHEMA}")
    # A file of before this was known has the zeros too.
    return found.model_copy(update={"measured": measures.measured(found.measured)})


@dataclass(frozen=True)
class Series:
    """Starts of two arms.

    Attributes:
        arms: The second is judged against the first.
        starts: In the order of running.
        wanted: How many there should have been; with fewer the series is incomplete.
        ended: In words why it is incomplete; empty for one that is whole.
        arm_words: What each arm is, by name.
        primary: Key of the primary measure; None: the first that is known.
        judged: Keys of the other measures that get a verdict; empty: the first that are known.
        command: What was run.
        alarms: What else must not be overlooked: the starts of files were not measured alike.
    """

    arms: tuple[str, str]
    starts: Sequence[Start]
    wanted: int
    ended: str = ""
    arm_words: Mapping[str, str] = field(default_factory=dict)
    primary: str | None = None
    judged: Sequence[str] = ()
    command: str = ""
    alarms: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every start was measured."""
        return not self.ended and len(self.starts) >= self.wanted


def series(paths: Sequence[Path], arms: Sequence[str], primary: str | None, judged: Sequence[str]) -> Series:
    """The starts in these files as a series: the arm of the first file is what the other is judged against.

    Args:
        paths: Of the files.
        arms: The names of both arms, in order; empty: as the files have them.
        primary: As in ``Series``.
        judged: As in ``Series``.

    Raises:
        ConfigError: A file is none of ours, one is there twice, or they are not of exactly two arms.
    """
    found = [read(path) for path in paths]
    _refuse_twice(paths, found)
    names = list(arms) or list(dict.fromkeys(start.arm for start in found))
    if len(set(names)) != 2 or {start.arm for start in found} != set(names):
        have = ", ".join(sorted({start.arm for start in found})) or "no file"
        raise refusal("FILES", found=f"starts of {have}", allowed="starts of two arms; --arms A,B names them in order")
    if len({start.questions for start in found if start.questions}) > 1:
        raise refusal(
            "FILES",
            found="starts that were sent different fixed requests, whose answers cannot be compared",
            allowed="starts measured with one --answers and one --requests",
        )
    for name in names:
        _refuse_other(name, [start for start in found if start.arm == name])
    ordered = sorted(found, key=lambda start: (float(start.about.get("at", 0)), start.place))
    words = {start.arm: start.words for start in ordered}
    benches = [_normal(start.bench, start) for start in ordered if start.bench]
    serves = [_normal(start.serve, start) for start in ordered if start.serve]
    alarms = [*_unlike("client", benches), *_unlike("server", serves)]
    return Series(
        (names[0], names[1]), ordered, len(ordered), arm_words=words, primary=primary, judged=judged, alarms=alarms
    )


def _refuse_twice(paths: Sequence[Path], found: Sequence[Start]) -> None:
    """A start that counts twice makes a difference of what was luck: by its path, or by when a copy says it ended."""
    seen: dict[object, Path] = {}
    for path, start in zip(paths, found, strict=True):
        for key in {path.resolve(), start.about.get("at", path.resolve())}:
            if key in seen:
                raise refusal("FILES", found=f"the same start twice: {seen[key]} and {path}", allowed="each start once")
            seen[key] = path


def _refuse_other(arm: str, starts: Sequence[Start]) -> None:
    """Two series may both have an arm A, and mean different things by it."""
    first = starts[0]
    for start in starts[1:]:
        if (start.variables, start.inherited) != (first.variables, first.inherited):
            raise refusal(
                "FILES",
                found=f"two arms of one name: {arm} is {first.words}, and {start.words}",
                allowed="starts of one name with the same variables",
            )


def _unlike(whose: str, commands: Sequence[Sequence[str]]) -> list[str]:
    """In words where the first of these commands that is another than the first one of all begins to differ."""
    for command in commands[1:]:
        for place, (one, other) in enumerate(zip_longest(commands[0], command, fillvalue="nothing")):
            if one != other:
                before = f" after {command[place - 1]}" if place else ""
                return [f"The starts' {whose} commands differ: {one[:_WORD]} and {other[:_WORD]}{before}"]
    return []


def _normal(words: Sequence[str], start: Start) -> list[str]:
    """A command without what differs from start to start: its port, host and the path of its result."""
    serve, bench = "\n".join(start.serve), "\n".join(start.bench)
    # Named as one, or a number that both commands have.
    ports = {*_PORT.findall(f"{serve}\n{bench}"), *({*_NUMBER.findall(serve)} & {*_NUMBER.findall(bench)})}
    found = []
    for word, before in zip(words, ["", *words], strict=False):
        plain = _RESULT.sub("{result}", word)
        for port in ports:
            plain = re.sub(rf"(?<!\d){port}(?!\d)", "{port}", plain)
        found.append("{host}" if before == "--host" else _HOST.sub(r"\1{host}", plain))
    return found
