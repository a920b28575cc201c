"""What a patch is, as data: seams, requirements, releases and options.

A declaration is read in every process that loads plugins, most of which never use it, so nothing here or in a
patch's ``__init__`` imports torch, vllm or wrapt. The wrappers a seam names by string are imported on install.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class State(str, enum.Enum):
    """The truth about one patch in one process; ``patches`` documents which state means what."""

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


class SeamKind(str, enum.Enum):
    """What is done with a slot."""

    WRAP = "wrap"
    """A wrapt wrapper around upstream's function."""
    ADD = "add"
    """A new attribute that upstream's class does not have; a working one of upstream's supersedes it."""
    PIN = "pin"
    """Nothing is written; we rely on it, so it must look as it did."""


@dataclass(frozen=True)
class Seam:
    """One slot of upstream's that a patch writes or relies on.

    Attributes:
        module: Module that owns the slot, for example ``vllm_omni.engine.stage_pool``.
        qualname: Path of the slot inside the module, for example ``StagePool.add_client``.
        parameters: Exact parameter names, in order. Empty for ``ADD``.
        kind: What is done with it.
        wrapper: Name in the patch's wrappers module; None for ``PIN``.
        fingerprints: Accepted fingerprints of the body (see ``omni_fastpath.seams.fingerprint``). Given where
            the body is replaced or its inside relied on; empty where only name and parameters matter.
        replaces: Whether the wrapper does not call what it wraps; then somebody else's wrapper must not stand there.
        descriptor: ``function``, ``classmethod`` or ``staticmethod``: the kind of the raw slot.
        probe: For ``ADD``, a function in the wrappers module that is given the owner when upstream already has the
            attribute; it returns None when upstream's behaves as ours would, else the difference in words.
    """

    module: str
    qualname: str
    parameters: tuple[str, ...] = ()
    kind: SeamKind = SeamKind.WRAP
    wrapper: str | None = None
    fingerprints: tuple[str, ...] = ()
    replaces: bool = False
    descriptor: str = "function"
    probe: str | None = None

    @property
    def path(self) -> str:
        """``module:qualname``, as error messages and ``explain`` show it."""
        return f"{self.module}:{self.qualname}"


class Options(BaseModel):
    """Base of every patch's values: unknown keys refused, no coercion of types, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def broken_rule(self, stages: int) -> tuple[str, str] | None:
        """The key whose value does not do for a pipeline with so many stages, and what would; None when all do."""
        del stages
        return None


@dataclass(frozen=True)
class Patch:
    """The declaration of one patch. ``docs`` is the module docstring, whose headings a test checks.

    Attributes:
        name: Key in the ``fastpath:`` block; upper case, the stem of its environment variables.
        summary: One line for tables.
        processes: Processes in which its slots are used.
        wrappers: Module with the wrappers, imported on install.
        seams: Verified all before any is written.
        options: Pydantic model of its values; every field has a default.
        requires: Names of patches without which it must not run.
        default_on: Whether ``fastpath: true`` includes it: only what the benchmarks show neutral or better.
        tested: vLLM-Omni releases it was tested on; any other is ``unsupported``.
        counters: Names of its engagement counters with their meaning; the first says how often it took effect.
        maxima: Names of the counters that are no counts but the greatest value seen.
        docs: The full explanation that ``omni-fastpath explain`` prints.
    """

    name: str
    summary: str
    processes: frozenset[Process]
    wrappers: str
    seams: tuple[Seam, ...]
    tested: tuple[str, ...]
    docs: str
    counters: Mapping[str, str]
    options: type[Options] = Options
    requires: tuple[str, ...] = ()
    default_on: bool = True
    maxima: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        """The environment variable that switches it."""
        return f"OMNI_FASTPATH_{self.name.upper()}"
