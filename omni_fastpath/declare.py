"""What a patch is, as data: what it is on each release, requirements, counters and options.

A declaration is read in every process that loads plugins, most of which never use it, so nothing here or in a
patch's ``__init__`` imports torch, vllm or wrapt: what a patch brings is named by string and imported on install. There
is a class for each thing that can be done with a name of upstream's, so that what does not go together cannot be said.
"""

from __future__ import annotations

import enum
import re
import sys
from dataclasses import dataclass, field
from typing import ClassVar

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


@dataclass(frozen=True)
class Seam:
    """One upstream name on which a patch relies: a ``Wrap``, ``Replace``, ``Add``, ``Call``, ``Pin`` or ``Reads``.

    Every upstream function that a patch calls is one of them, and every attribute that it reads and a class declares.
    Attributes that no class declares are named on the patch's page, under Fragility.

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
    """An upstream function, verified before anything is written. Its kinds say what is done with it.

    ``omni_fastpath/functions`` has the kind, the parameters and a fingerprint of each on every release that was read.
    On such a release kind and parameters must be as there. On another release the fingerprint must be too, see
    ``omni_fastpath.install``.

    Attributes:
        pinned: Whether the patch relies on the body or goes past it, so that the fingerprint matters on every release.
    """

    pinned: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Wrap(Function):
    """A wrapt wrapper around upstream's function, which it calls.

    Attributes:
        wrapper: Its name in the patch's wrappers module.
    """

    use = "wrap"

    wrapper: str = field(kw_only=True)


@dataclass(frozen=True)
class Replace(Wrap):
    """A wrapper that calls upstream's function only to step aside, so that no other package's wrapper may be below."""

    pinned: bool = field(default=True, init=False)


@dataclass(frozen=True)
class Call(Function):
    """Nothing is written. The patch calls it, so that it must be there and take the same parameters."""

    use = "pin"


@dataclass(frozen=True)
class Pin(Function):
    """Nothing is written. The patch relies on what it does inside."""

    use = "pin"

    pinned: bool = field(default=True, init=False)


@dataclass(frozen=True)
class Reads(Seam):
    """Attributes of a class's instances that the patch reads: the class must declare each, or assign it to ``self``.

    Attributes:
        names: The attributes.
    """

    use = "read"

    names: tuple[str, ...]


@dataclass(frozen=True)
class Add(Seam):
    """A new attribute; a class that has one of that name, by inheritance too, is not as declared.

    Attributes:
        function: Name in the patch's wrappers module of what is added.
    """

    use = "add"

    function: str = field(kw_only=True)


AnySeam = Wrap | Replace | Add | Call | Pin | Reads


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a patch is on some releases of vLLM-Omni where it is not installed; ``Fit`` is a row where it is.

    Attributes:
        releases: Exact public releases, for example ``0.30.0`` or ``0.32.0rc1``. Each stands in one row of a patch.
        state: ``superseded`` or ``not_applicable``.
        note: Why, in a few words that go into the reason of the state; of a ``Fit`` what users of these releases
            should know.
        preview: Whether these are supported before their final release; every reason says it.
        seams: By which another release that has the same code is known; empty where only builds and post-releases of
            these do. Of a ``Fit`` also what is written.
    """

    releases: tuple[str, ...]
    state: State
    note: str = ""
    preview: bool = False
    seams: tuple[AnySeam, ...] = ()

    def seams_in(self, process: Process | None) -> tuple[AnySeam, ...]:
        """The seams that matter in a kind of process; all of them for None."""
        del process
        return self.seams

    @property
    def remarks(self) -> str:
        """The part of the state's reason that comes from the declaration."""
        return "; ".join(word for word in ("preview" if self.preview else "", self.note) if word)


@dataclass(frozen=True, kw_only=True)
class Fit(Row):
    """The patch is installed on these releases.

    Attributes:
        of_stages: Modules of the seams that only the stages' processes install; the server installs the others. Empty
            where every process of the patch installs all of them.
        of_api_server: Modules of the seams that only upstream's API server imports. A server process that neither is
            ``vllm serve`` nor has imported them goes without these seams.
        without_api_server: What it goes without, in words that go into the reason of ``applied``.
    """

    state: State = field(default=State.APPLIED, init=False)
    of_stages: tuple[str, ...] = ()
    of_api_server: tuple[str, ...] = ()
    without_api_server: str = ""

    def seams_in(self, process: Process | None) -> tuple[AnySeam, ...]:
        """The seams that a kind of process verifies before it writes any; all of them for None."""
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
        headline: What it counts, in how the first line about a server says it; empty where that does not say it.
    """

    name: str
    meaning: str
    is_maximum: bool = field(default=False, kw_only=True)
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
    """Base of every patch's values: unknown keys refused, no coercion of types, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The declaration of one patch. ``docs`` is the module docstring, whose headings a test checks.

    Attributes:
        name: Key in the ``fastpath:`` block and the name of its folder; upper case, the stem of its environment
            variables.
        summary: One line for tables.
        processes: Processes in which its slots are used.
        docs: The full explanation that ``omni-fastpath explain`` prints; None under ``python -OO``.
        rows: What it is on each release that it was tested on, oldest first; on any other it is ``unsupported``, unless
            that one has the same code (``on_unlisted``).
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
    docs: str | None
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

    def listed(self, release: str | None) -> tuple[str, Row] | None:
        """Exactly this release as a row names it, and the row; None where there is none, or that is no version."""
        found = _version(release)
        return next(((each, row) for version, each, row in self._known() if version == found), None)

    def row_on(self, release: str | None) -> Row | None:
        """The row of exactly this release, if there is one."""
        found = self.listed(release)
        return None if found is None else found[1]

    def nearest_first(self, release: str) -> list[tuple[str, Row]]:
        """Every release that was read with its row: the newest that is not after this one, older ones, newer ones."""
        target = Version((_version(release) or Version("0")).base_version)
        older = [(each, row) for version, each, row in self._known() if version <= target]
        newer = [(each, row) for version, each, row in self._known() if version > target]
        return [*reversed(older), *newer]

    def candidates(self, release: str, on_unlisted: str | None) -> list[tuple[str, Row]]:
        """The rows that an unlisted release may be served by, each with the release that it must equal.

        Args:
            release: As its metadata has it.
            on_unlisted: ``same_code`` for any release, ``unsupported`` for none; None for builds (``0.30.0+cu130``) and
                post-releases (``0.30.0.post1``) of a listed release alone.
        """
        bare = _version(re.sub(r"\.post\d+$", "", str(getattr(_version(release), "public", ""))))
        is_build = bare in [version for version, _, _ in self._known()]
        if on_unlisted != "same_code" and (on_unlisted or not is_build):
            return []
        return [(each, row) for each, row in self.nearest_first(release) if row.seams or _version(each) == bare]

    def _known(self) -> list[tuple[Version, str, Row]]:
        return [(Version(release), release, row) for row in self.rows for release in row.releases]

    @property
    def wrappers(self) -> str:
        """The module with the functions that the seams name; it is imported on install."""
        return f"omni_fastpath.patches.{self.name}.wrappers"


def _version(text: str | None) -> Version | None:
    """None where the text is no version."""
    try:
        return Version(text or "")
    except InvalidVersion:
        return None
