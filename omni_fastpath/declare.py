"""What a patch is, as data: what it is on each release, requirements, counters and options.

A declaration is read in every process that loads plugins, most of which never use it, so nothing here or in a
patch's ``__init__`` imports torch, vllm or wrapt: what a patch brings is named by string and imported on install. There
is a class for each thing that can be done with a name of upstream's, so that what does not go together cannot be said.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict

from omni_fastpath import process_role


class State(str, enum.Enum):
    """The truth about one patch in one process; ``omni_fastpath.patches`` says what each means."""

    OFF = "off"
    APPLIED = "applied"
    NOT_APPLICABLE = "not_applicable"
    SUPERSEDED = "superseded"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"

    @property
    def is_trouble(self) -> bool:
        """Whether the patch was asked for and cannot serve: a refusal under ``on_unsupported: fail``."""
        return self in (State.UNSUPPORTED, State.FAILED)

    @property
    def satisfies_requirement(self) -> bool:
        """Whether a patch in this state gives its dependants what they need."""
        return self in (State.APPLIED, State.SUPERSEDED)


class Process(str, enum.Enum):
    """The kinds of process a patch's slots are used in."""

    SERVER = "server"
    """Front end and orchestrator thread: the API server, ``AsyncOmni``, ``Omni``."""
    STAGE = "stage"
    """A spawned stage engine: scheduler, connector, and the worker where it is in the same process."""
    WORKER = "worker"
    """A worker of a stage in a process of its own, or a diffusion stage: there is no scheduler."""
    HEADLESS = "headless"
    """``vllm serve --omni --headless``: it starts stages for an orchestrator that runs elsewhere."""


if TYPE_CHECKING:
    from typing_extensions import Unpack

    _AtLeastOne = tuple[str, Unpack[tuple[str, ...]]]

Descriptor = Literal["function", "classmethod", "staticmethod"]
"""What stands raw in an owner's ``__dict__``."""


@dataclass(frozen=True)
class Seam:
    """One name of upstream's that a patch writes or relies on: a ``Wrap``, ``Replace``, ``Add``, ``Call`` or ``Pin``.

    Whatever of upstream's a patch calls is one of them. Attributes that it reads stand on its page, under Fragility.

    Attributes:
        module: Module that owns the slot, for example ``vllm_omni.engine.stage_pool``.
        qualname: Path of the slot inside the module, for example ``StagePool.add_client``.
    """

    use: ClassVar[str]
    """What is done with it, in the one word that ``explain`` shows."""

    module: str
    qualname: str

    @property
    def path(self) -> str:
        """``module:qualname``, as error messages and ``explain`` show it."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Function(Seam):
    """A function of upstream's, verified before anything is written. Not used itself: its kinds say what is done.

    Attributes:
        parameters: Exact parameter names, in order.
        descriptor: The kind of the raw slot.
        fingerprints: Of the bodies that were read, where the patch relies on the inside or goes past it (see
            ``omni_fastpath.seams.fingerprint``); empty where only name and parameters matter.
    """

    parameters: tuple[str, ...]
    descriptor: Descriptor = field(default="function", kw_only=True)
    fingerprints: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Wrap(Function):
    """A wrapt wrapper around upstream's function, which it calls.

    Attributes:
        wrapper: Its name in the patch's wrappers module.
    """

    use = "wrap"

    wrapper: str = field(kw_only=True)


@dataclass(frozen=True)
class Replace(Function):
    """A wrapt wrapper that calls upstream's function only to step aside, so that no other wrapper may stand on that.

    Attributes:
        wrapper: Its name in the patch's wrappers module.
    """

    use = "wrap"

    wrapper: str = field(kw_only=True)
    fingerprints: _AtLeastOne = field(kw_only=True)


@dataclass(frozen=True)
class Call(Function):
    """Nothing is written; the patch calls it, so that it must be there and take these parameters."""

    use = "pin"

    fingerprints: tuple[()] = field(default=(), init=False)


@dataclass(frozen=True)
class Pin(Function):
    """Nothing is written; the patch relies on what it does inside, so that its body must be one that was read."""

    use = "pin"

    fingerprints: _AtLeastOne = field(kw_only=True)


@dataclass(frozen=True)
class Add(Seam):
    """A new attribute; a class that has one of that name, by inheritance too, is not as declared.

    Attributes:
        function: Name in the patch's wrappers module of what is added.
    """

    use = "add"

    function: str = field(kw_only=True)


AnySeam = Wrap | Replace | Add | Call | Pin


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a patch is on some releases of vLLM-Omni where it is not installed; ``Fit`` is a row where it is.

    Attributes:
        releases: Exact public releases, for example ``0.30.0`` or ``0.32.0rc1``. Each stands in one row of a patch.
        state: ``superseded`` or ``not_applicable``.
        note: Why, in a few words that go into the reason of the state; of a ``Fit`` what users of these releases
            should know.
        preview: Whether these are supported before their final release; every reason says it.
    """

    releases: tuple[str, ...]
    state: State
    note: str = ""
    preview: bool = False

    @property
    def remarks(self) -> str:
        """The part of the state's reason that comes from the declaration."""
        return "; ".join(word for word in ("preview" if self.preview else "", self.note) if word)


@dataclass(frozen=True, kw_only=True)
class Fit(Row):
    """The patch is installed on these releases.

    Attributes:
        seams: All that a process installs are verified there before any is written.
        of_stages: Modules of the seams that only the stages' processes install; the server installs the others. Empty
            where every process of the patch installs all of them.
        of_api_server: Modules of the seams that only upstream's API server imports. A server process that neither is
            ``vllm serve`` nor has imported them goes without these seams.
        without_api_server: What it goes without, in words that go into the reason of ``applied``.
    """

    state: State = field(default=State.APPLIED, init=False)
    seams: tuple[AnySeam, ...]
    of_stages: tuple[str, ...] = ()
    of_api_server: tuple[str, ...] = ()
    without_api_server: str = ""

    def seams_in(self, process: Process | None) -> tuple[AnySeam, ...]:
        """The seams that a kind of process installs; all of them for None."""
        if process is None:
            return self.seams
        left_out: set[str] = set()
        if process is Process.SERVER and not self._has_api_server():
            left_out.update(self.of_api_server)
        if self.of_stages:
            of_others = {seam.module for seam in self.seams} - set(self.of_stages)
            left_out.update(of_others if process is Process.STAGE else self.of_stages)
        return tuple(seam for seam in self.seams if seam.module not in left_out)

    def _has_api_server(self) -> bool:
        return process_role.is_serve(sys.argv[1:]) or all(module in sys.modules for module in self.of_api_server)


@dataclass(frozen=True)
class Counter:
    """One figure that tells how a patch took effect in a process.

    Attributes:
        name: As the state file and ``/metrics`` have it.
        meaning: In a line, as ``explain`` shows it.
        is_maximum: Whether it is no count but the greatest value seen.
        moves_with: The counter on ``/metrics``, of upstream's, that never moves without this one; empty where there is
            none. Of a patch's first counter it tells whether a patch that is idle ought not to be.
        headline: What it counts, in how the first line about a server says it; empty where that does not say it.
    """

    name: str
    meaning: str
    is_maximum: bool = field(default=False, kw_only=True)
    moves_with: str = field(default="", kw_only=True)
    headline: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Metric:
    """A family of figures on ``/metrics`` that a patch has besides its counters.

    Each sample has the labels ``process``, ``stage`` and ``replica``: of the process that has it, unless the sample
    says itself which stage and replica it is of.

    Attributes:
        name: As ``/metrics`` has it, with its unit.
        meaning: In a line, as ``/metrics`` and ``explain`` show it.
        labels: More labels.
        bounds: Upper ends of a histogram's buckets but the last; None for a gauge.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = field(default=(), kw_only=True)
    bounds: tuple[float, ...] | None = field(default=None, kw_only=True)


class Options(BaseModel):
    """Base of every patch's values: unknown keys refused, no coercion of types, immutable.

    Attributes:
        gone: Keys that earlier versions took, each with its successor or why it went, in words for the refusal.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    gone: ClassVar[Mapping[str, str]] = {}

    def broken_rule(self, stages: int) -> tuple[str, str] | None:
        """The key whose value does not do for a pipeline with so many stages, and what would; None when all do."""
        del stages
        return None


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The declaration of one patch. ``docs`` is the module docstring, whose headings a test checks.

    Attributes:
        name: Key in the ``fastpath:`` block and the name of its folder; upper case, the stem of its environment
            variables.
        summary: One line for tables.
        processes: Processes in which its slots are used.
        docs: The full explanation that ``omni-fastpath explain`` prints.
        rows: What it is on each release that it was tested on, oldest first; on any other it is ``unsupported``.
        counters: What tells that it took effect; the first says how often.
        options: Pydantic model of its values; every field has a default.
        requires: Names of patches without which it must not run.
        default_on: Whether ``fastpath: true`` includes it: only what the benchmarks show neutral or better.
        upstream_option: The option of upstream's server that it makes true, for example ``--max-num-queued-reqs``: in a
            server without it the patch is ``not_applicable``. Empty where it has none.
        taken_off: Name of a function in every wrappers module that is called after all slots were put back, and when
            the patch has failed: it releases whatever others wait for. It may be called twice, on any thread.
        metrics: What it has for ``/metrics`` besides the counters.
        figures: Name of a function in every wrappers module that gives what these show now, on whichever thread, and
            perhaps on two at once: for each by name a list of samples (``omni_fastpath.figures``).
    """

    name: str
    summary: str
    processes: frozenset[Process]
    docs: str
    rows: tuple[Row, ...]
    counters: tuple[Counter, ...]
    options: type[Options] = Options
    requires: tuple[str, ...] = ()
    default_on: bool = True
    upstream_option: str = ""
    taken_off: str | None = None
    metrics: tuple[Metric, ...] = ()
    figures: str | None = None

    @property
    def env(self) -> str:
        """The environment variable that switches it."""
        return f"OMNI_FASTPATH_{self.name.upper()}"

    @property
    def releases(self) -> tuple[str, ...]:
        """Of all of its rows, in order."""
        return tuple(release for row in self.rows for release in row.releases)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """The rows in which it is installed, in order."""
        return tuple(row for row in self.rows if isinstance(row, Fit))

    def row_on(self, release: str | None) -> Row | None:
        """What it is on an installed release; None when it was not tested there, or that is no version, or none.

        A local version (``0.30.0+cpu``) is the release itself; a development or another pre-release of it is not.
        """
        try:
            found = Version(Version(release or "").public)
        except InvalidVersion:
            return None
        return next((row for row in self.rows if found in map(Version, row.releases)), None)

    @property
    def wrappers(self) -> str:
        """The module with the functions that the seams name; it is imported on install."""
        return f"omni_fastpath.patches.{self.name}.wrappers"
