"""A finding, and the report of ``omni-fastpath doctor``, as data with stable keys.

``doctor.schema.json`` beside this file is the report's JSON schema; a test says that it is ``Doctor``'s.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Final = 1
"""Of the report; a key is only ever added under the same number."""

SCHEMA_FILE = Path(__file__).with_name("doctor.schema.json")

Evidence = str | int | float | bool | None | list[str]
"""What was seen under a name; a figure's name ends in its unit."""


def as_text(found: str) -> str:
    """A name or value of the system's, which may hold bytes that are no text, as a model and JSON take it."""
    return found.encode(errors="backslashreplace").decode()


class Severity(str, enum.Enum):
    """How much a finding weighs."""

    ERROR = "error"
    """Something that was asked for does not happen."""
    WARNING = "warning"
    """It happens, and something beside it is not as it should be."""
    INFO = "info"
    """To know, and nothing to do at once."""

    @property
    def weight(self) -> int:
        """For sorting, the heaviest first."""
        return list(Severity).index(self)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Model):
    """One thing that is not as it should be, or that is to be known."""

    id: str = Field(description="The rule's, which never changes its meaning")
    severity: Severity
    subject: str = Field(description="What it is about: `installation`, `server PID` or `machine`")
    what: str = Field(description="The finding in a sentence")
    evidence: dict[str, Evidence] = Field(description="What was seen, by name")
    threshold: str = Field(description="From what on it is a finding")
    do: str = Field(description="What to do about it")


class ServerReport(_Model):
    """One live server as it was seen."""

    pid: int
    role: Literal["server", "headless"]
    processes: int = Field(description="Of its tree, itself included")
    reporting: int = Field(description="Of them, those with a state file")
    versions: list[str] = Field(description="Of omni-fastpath, vllm-omni and vllm, as its processes say")
    patches: dict[str, str] = Field(description="The states of each patch over its processes, `applied x2, off x1`")


class Versions(_Model):
    """What is installed here."""

    omni_fastpath: str
    vllm_omni: str | None
    vllm: str | None
    python: str
    platform: str


class Doctor(_Model):
    """The report of ``omni-fastpath doctor --json``."""

    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    versions: Versions
    environment: dict[str, str] = Field(description="Our variables in this shell")
    servers: list[ServerReport]
    findings: list[Finding] = Field(description="The heaviest first")
    issue: str = Field(description="Markdown to paste into an issue, without names of users and hosts")
