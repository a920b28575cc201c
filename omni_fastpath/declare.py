"""The declaration of a patch, as data: its state on each release, its requirements, counters and options.

Declarations are imported in processes that never use them, so neither this module nor a patch's ``__init__`` imports
torch, vllm or wrapt. A patch's functions are named by strings and imported when it is installed. Each way to use an
upstream name has its own class.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict


class State(str, enum.Enum):
    """The state of one patch in one process. ``omni_fastpath.patches`` explains each state."""

    OFF = "off"
    APPLIED = "applied"
    NOT_APPLICABLE = "not_applicable"
    SUPERSEDED = "superseded"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"

    @property
    def is_trouble(self) -> bool:
        """Whether the patch was requested and cannot serve. Under ``on_unsupported: fail`` this refuses the start."""
        return self in (State.UNSUPPORTED, State.FAILED)

    @property
    def satisfies_requirement(self) -> bool:
        """Whether patches that require a patch in this state can be installed."""
        return self in (State.APPLIED, State.SUPERSEDED)


class Process(str, enum.Enum):
    """The kinds of processes in which patches are used."""

    SERVER = "server"
    """Front end and orchestrator thread: the API server, ``AsyncOmni``, ``Omni``."""
    STAGE = "stage"
    """A spawned stage engine: scheduler, connector, and the worker if it is in the same process."""
    WORKER = "worker"
    """A worker of a stage in its own process, or a diffusion stage. It has no scheduler."""
    HEADLESS = "headless"
    """``vllm serve --omni --headless``, which starts stages for an orchestrator on another host."""


@dataclass(frozen=True)
class Seam:
    """An upstream name on which a patch relies: a ``Wrap``, ``Replace`` or ``Add``, which is written, or a ``Relies``.

    ``omni_fastpath/fingerprints`` has the fingerprint of each but an ``Add`` on every release that was read. The patch
    is installed only where they match. Every upstream function that a patch calls is declared, as is every class whose
    attributes it reads, unless a declared function reads them too. A patch's docstring names the attributes that no
    class declares, under Fragility.

    Attributes:
        module: The module, for example ``vllm_omni.engine.stage_pool``.
        qualname: The path inside the module, for example ``StagePool.add_client``.
    """

    module: str
    qualname: str

    @property
    def path(self) -> str:
        """``module:qualname``, as in messages."""
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Wrap(Seam):
    """Wrap a function with wrapt. The wrapper calls it.

    Attributes:
        wrapper: The wrapper's name in the patch's wrappers module.
    """

    wrapper: str = field(kw_only=True)


@dataclass(frozen=True)
class Replace(Wrap):
    """Replace a function's body. The function itself is called only when the patch steps aside.

    Therefore the patch is not installed over another package's wrapper, which it would bypass.
    """


@dataclass(frozen=True)
class Add(Seam):
    """Add a new attribute. The class must not have one of that name, not even an inherited one.

    Attributes:
        function: The name of the added function in the patch's wrappers module.
    """

    function: str = field(kw_only=True)


@dataclass(frozen=True)
class Relies(Seam):
    """Rely on the body of a function, or on the attributes that a class declares. Nothing is written.

    Another package's wrapper around the function would change it, so the patch is not installed.
    """


STAGE_NAMES = Relies("vllm_omni.engine.stage_engine_core_proc_manager", "StageEngineCoreProcManager.__init__")
"""Names the processes of stages, which `process_role` knows by these names. Every patch of a stage relies on it."""


AnySeam = Wrap | Replace | Add | Relies


@dataclass(frozen=True, kw_only=True)
class Row:
    """A patch's state on some releases. It is installed only on those of a row that is a ``Fit``.

    Attributes:
        releases: Exact public releases, for example ``0.30.0`` or ``0.32.0rc1``. Each is in one row of a patch only.
        state: ``superseded`` or ``not_applicable``.
        note: A few words for the reason of the state. In a ``Fit``: what users of these releases should know.
        seams: The seams that must match on an unlisted release. If it is empty, only builds and post-releases of these
            releases match.
    """

    releases: tuple[str, ...]
    state: State
    note: str = ""
    seams: tuple[AnySeam, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fit(Row):
    """The patch is installed on these releases.

    Attributes:
        of_api_server: Modules that only upstream's API server imports. A server process that is not ``vllm serve`` and
            has not imported them does not install their seams.
        without_api_server: What such a process lacks, for the reason of ``applied``.
    """

    state: State = field(default=State.APPLIED, init=False)
    of_api_server: tuple[str, ...] = ()
    without_api_server: str = ""


@dataclass(frozen=True)
class Counter:
    """A number that shows what a patch did in a process. A patch's first one shows how often it took effect.

    Attributes:
        name: Its name in the state file and in ``/metrics``.
        meaning: One line, for ``explain``.
        is_maximum: Whether it is the greatest value seen instead of a count.
    """

    name: str
    meaning: str
    is_maximum: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What ``omni-fastpath doctor`` says about a metric: a finding for each combination of labels.

    Attributes:
        finding: The finding's name, which does not change.
        severity: ``warning`` or ``info``.
        above: The value above which there is a finding. Of a histogram it is the 99th percentile.
        labels: The labels that a sample must have.
        what: The finding in one sentence, with ``{value}`` and the sample's labels.
        do: What to do about it.
    """

    finding: str
    severity: Literal["warning", "info"] = "warning"
    above: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    what: str
    do: str


@dataclass(frozen=True)
class Metric:
    """A metric of a patch besides its counters.

    A sample has ``labels``, and either a ``value``, or the ``counts`` of each bucket with the ``sum`` of the values and
    ``before``, the counts of some minutes ago.

    Each sample has the labels ``process``, ``stage`` and ``replica`` of the process that exports it, unless the sample
    itself names a stage and replica.

    Attributes:
        name: Its name in ``/metrics``, with its unit.
        meaning: One line, for ``/metrics`` and ``explain``.
        labels: Further labels.
        bounds: Upper bounds of a histogram's buckets but the last. None for a gauge.
        advice: What ``doctor`` says about it.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = field(default=(), kw_only=True)
    bounds: tuple[float, ...] | None = field(default=None, kw_only=True)
    advice: Advice | None = field(default=None, kw_only=True)


class Options(BaseModel):
    """The base of every patch's options. Unknown keys are refused, types are not converted, values are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The declaration of one patch.

    Attributes:
        name: Its key in the ``fastpath:`` block, and the name of its folder. Its variables contain it in upper case.
        summary: One line for tables.
        processes: The kinds of processes in which it is installed.
        docs: The module docstring, which ``omni-fastpath explain`` prints. A test checks its headings. None under
            ``python -OO``.
        rows: Its state on each release on which it was tested, oldest first. On any other release it is
            ``unsupported``, unless that release has the same code (``on_unlisted``).
        counters: Its counters. The first is the number of times that it took effect.
        options: The pydantic model of its values. Every field has a default.
        requires: The names of patches without which it must not run, in the processes in which those are installed.
        default_on: Whether ``fastpath: true`` includes it. That needs benchmarks in which it is neutral or better.
        metrics: Its metrics besides the counters.
        removed: Former keys of its values, each with the sentence that refuses it.
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
    metrics: tuple[Metric, ...] = ()
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> str:
        """The environment variable that switches it on or off."""
        return f"OMNI_FASTPATH_{self.name.upper()}"

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases of all rows, in order."""
        return tuple(release for row in self.rows for release in row.releases)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """The rows of releases on which it is installed, in order."""
        return tuple(row for row in self.rows if isinstance(row, Fit))

    def listed(self, release: str | None) -> tuple[str, Row] | None:
        """The release as its row spells it, and the row. None if no row has it, or it is not a version."""
        found = _version(release)
        return next(((each, row) for version, each, row in self._known() if version == found), None)

    def candidates(self, release: str, on_unlisted: str | None) -> list[tuple[str, Row]]:
        """The rows that may serve an unlisted release, each with the release whose code it must have.

        Those up to this release are first, the newest first, then the later ones.

        Args:
            release: The version from its metadata.
            on_unlisted: ``same_code`` accepts any release, ``unsupported`` none. None accepts only builds
                (``0.30.0+cu130``) and post-releases (``0.30.0.post1``) of a listed release.
        """
        bare = _version(re.sub(r"\.post\d+$", "", str(getattr(_version(release), "public", ""))))
        is_build = bare in [version for version, _, _ in self._known()]
        if on_unlisted != "same_code" and (on_unlisted or not is_build):
            return []
        known = [entry for entry in self._known() if entry[2].seams or entry[0] == bare]
        target = Version((_version(release) or Version("0")).base_version)
        older = [(each, row) for version, each, row in known if version <= target]
        return [*reversed(older), *((each, row) for version, each, row in known if version > target)]

    def _known(self) -> list[tuple[Version, str, Row]]:
        return [(Version(release), release, row) for row in self.rows for release in row.releases]

    @property
    def wrappers(self) -> str:
        """The module with the functions that the seams name. It is imported when the patch is installed.

        It may have two more functions. ``step_aside()`` releases everything that others wait for. It is called after
        uninstalling and after a failure, possibly twice, on any thread. ``figures()`` returns the samples of each
        metric by name (``Metric``). It is called on any thread, possibly on two at once.
        """
        return f"omni_fastpath.patches.{self.name}.wrappers"


def _version(text: str | None) -> Version | None:
    """The version. None if the text is not one."""
    try:
        return Version(text or "")
    except InvalidVersion:
        return None
