"""A start in a file: what was measured, which arm it was of, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath.values import refusal

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
    return found


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
    """

    arms: tuple[str, str]
    starts: Sequence[Start]
    wanted: int
    ended: str = ""
    arm_words: Mapping[str, str] = field(default_factory=dict)
    primary: str | None = None
    judged: Sequence[str] = ()
    command: str = ""

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
        ConfigError: A file is none of ours, or they are not of exactly two arms.
    """
    found = [read(path) for path in paths]
    names = list(arms) or list(dict.fromkeys(start.arm for start in found))
    if len(set(names)) != 2 or {start.arm for start in found} != set(names):
        have = ", ".join(sorted({start.arm for start in found})) or "no file"
        raise refusal("FILES", found=f"starts of {have}", allowed="starts of two arms; --arms A,B names them in order")
    ordered = sorted(found, key=lambda start: (float(start.about.get("at", 0)), start.place))
    words = {start.arm: start.words for start in ordered}
    return Series((names[0], names[1]), ordered, len(ordered), arm_words=words, primary=primary, judged=judged)
