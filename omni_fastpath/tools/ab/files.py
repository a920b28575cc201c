"""A start in a file: what was measured, which arm it was of, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from omni_fastpath.config import refusal


class Start(BaseModel):
    """One start of one arm, as its file has it.

    Attributes:
        arm: Its arm's name.
        variables: What made the arm, as a report may show it.
        inherited: What else of this shell's environment may matter to vLLM-Omni and to us, shown alike.
        place: Its place in the series, the first is 1.
        about: When, which versions, commit and machine.
        serve: The server's command, as a report may show it, its placeholders not filled in.
        bench: The client's.
        start_s: From start to ready, seconds.
        measured: The client's numbers that have a direction, by their key.
        failed: Requests that failed under the client's load.
        answers: What the fixed requests were answered; empty: none was sent.
        no_answers: In words why none was.
        questions: Digest of the fixed requests.
        simulated: The device is the simulated one.
        states: What the state files of its processes said after the load.
    """

    schema_: Literal[2] = Field(default=2, alias="schema")
    arm: str
    variables: dict[str, str] = {}
    inherited: dict[str, str] = {}
    place: int = 1
    about: dict[str, Any] = {}
    serve: list[str] = []
    bench: list[str] = []
    start_s: float = 0.0
    measured: dict[str, float] = {}
    failed: int = 0
    answers: list[dict[str, Any]] = []
    no_answers: str = ""
    questions: str = ""
    simulated: bool = False
    states: list[dict[str, Any]] = []

    @property
    def words(self) -> str:
        """What its arm is, in words."""
        own, shells = (" ".join(map("=".join, each.items())) for each in (self.variables, self.inherited))
        return f"{own or 'no variable of its own'}{f' (from this shell: {shells})' if shells else ''}"

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
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
        judged: Keys of the other measures that get a verdict; empty: the first that are known.
        alarms: What else must not be overlooked: the starts of files were not measured alike.
    """

    arms: tuple[str, str]
    starts: Sequence[Start]
    wanted: int
    ended: str = ""
    primary: str | None = None
    judged: Sequence[str] = ()
    alarms: Sequence[str] = ()

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
    names = list(arms) or list(dict.fromkeys(start.arm for start in found))
    if len(set(names)) != 2 or {start.arm for start in found} != set(names):
        have = ", ".join(sorted({start.arm for start in found})) or "no file"
        raise refusal("FILES", found=f"starts of {have}", allowed="starts of two arms; --arms A,B names them in order")
    if len({start.about.get("at") for start in found}) < len(found):
        # A start that counts twice makes a difference of what was luck.
        raise refusal("FILES", found="the same start twice", allowed="each start once")
    if len({start.questions for start in found}) > 1:
        raise refusal(
            "FILES",
            found="starts that were sent different fixed requests, whose answers cannot be compared",
            allowed="starts measured with one --answers and one benchmark client",
        )
    for name in names:
        said = sorted({start.words for start in found if start.arm == name})
        if len(said) > 1:  # two series may both have an arm A, and mean different things by it
            allowed = "starts of one name with the same variables"
            raise refusal("FILES", found=f"two arms of one name: {name} is {said[0]}, and {said[1]}", allowed=allowed)
    commands = {"server": {tuple(each.serve) for each in found}, "client": {tuple(each.bench) for each in found}}
    alarms = [f"The starts' {whose} commands differ" for whose, each in commands.items() if len(each) > 1]
    ordered = sorted(found, key=lambda start: float(start.about.get("at", 0)))
    return Series((names[0], names[1]), ordered, len(ordered), primary=primary, judged=judged, alarms=alarms)
