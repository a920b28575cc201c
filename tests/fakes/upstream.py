"""Made-up upstream modules and patches on them, for the machinery's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omni_fastpath import install, seams
from omni_fastpath.config import Resolved
from omni_fastpath.declare import Add, AnySeam, Counter, Fit, Options, Patch, Process, Row, State, Wrap
from omni_fastpath.ledger import LEDGER
from omni_fastpath.releases import Release

TESTED = "0.30.0"


def seams_here(patch: Patch) -> tuple[AnySeam, ...]:
    """The patch's seams on the installed vLLM-Omni; none where it is not installed."""
    row = install.row_here(patch)
    return row.seams if isinstance(row, Fit) else ()


MODULE = "made_up_upstream"
SOURCE = '''
def listen(port, *, backlog=5):
    return ("listening", port, backlog)


class Base:
    def inherited(self):
        return "inherited"


class Loop(Base):
    def run(self, rounds):
        """Run."""
        return ("stock", rounds)

    @classmethod
    def make(cls, size):
        return (cls, size)

    @staticmethod
    def check(value):
        return value

    constant = 7


nothing = None
'''


def load(folder: Path, source: str, name: str = MODULE) -> ModuleType:
    """A module made from source that ``inspect`` can read."""
    file = folder / f"{name}_{len(list(folder.iterdir()))}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def passes(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """A wrapper that marks what it passes on."""
    return ("ours", wrapped(*args, **kwargs))


class Upstream:
    """A made-up upstream in ``sys.modules`` and a wrappers module for patches on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.module = load(folder, SOURCE)
        self.wrappers = ModuleType("made_up_wrappers")
        self.wrappers.passes = passes  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, MODULE, self.module)
        monkeypatch.setitem(sys.modules, "made_up_wrappers", self.wrappers)
        self.functions: dict[str, dict[str, list[str]]] = {}
        read = self._read()
        monkeypatch.setattr(seams, "recorded", lambda release: self.functions.setdefault(release, dict(read)))
        monkeypatch.setattr(seams, "UPSTREAM", {MODULE, "made_up_stages"})
        self.release(TESTED)

    def _read(self) -> dict[str, list[str]]:
        """What a release that was read has: the functions of this module as they are now, and one that it lacks."""
        of_loop = {f"Loop.{name}": vars(self.module.Loop)[name] for name in ("run", "make", "check")}
        raws = {"listen": self.module.listen, "Loop": self.module.Loop, **of_loop}
        found = {name: [seams.fingerprint(seams.function_in(raw))] for name, raw in raws.items()}
        return {f"{MODULE}:{name}": each for name, each in {**found, "Loop.gone": ["0" * 16]}.items()}

    def read(self, path: str, *bodies: str, release: str = TESTED) -> None:
        """Have a function had these fingerprints on a release."""
        seams.recorded(release)
        self.functions[release][path] = [*bodies]

    def module_is(self, module: ModuleType) -> None:
        """Have a module imported."""
        self._monkeypatch.setitem(sys.modules, module.__name__, module)

    def release(self, version: str | None) -> None:
        """Set the installed release."""
        found = None if version is None else Release("vllm-omni", version)
        self._monkeypatch.setattr(install, "vllm_omni_release", lambda: found)

    def slots(self) -> dict[str, dict[str, Any]]:
        """The raw slots of everything that a patch could write."""
        owners = {"": self.module, "Base": self.module.Base, "Loop": self.module.Loop}
        return {name: dict(vars(owner)) for name, owner in owners.items()}


RUN = Wrap(MODULE, "Loop.run", wrapper="passes")
MAKE = Wrap(MODULE, "Loop.make", wrapper="passes")
CHECK = Wrap(MODULE, "Loop.check", wrapper="passes")
LISTEN = Wrap(MODULE, "listen", wrapper="passes")
ADDED = Add(MODULE, "Loop.added", function="added")
MOVED = Wrap(MODULE, "Loop.gone", wrapper="passes")


@dataclass(frozen=True, kw_only=True)
class MadeUpPatch(Patch):
    """A patch that has no folder: its wrappers are in a module that the test makes."""

    wrappers_module: str = "made_up_wrappers"

    @property
    def wrappers(self) -> str:
        """Its wrappers module."""
        return self.wrappers_module


def patch(
    name: str, *own: AnySeam, releases: tuple[str, ...] = (TESTED,), rows: tuple[Row, ...] = (), **fields: Any
) -> Patch:
    """A patch on the made-up upstream: with these seams on these releases, or with these rows."""
    given: dict[str, Any] = {
        "summary": "",
        "processes": frozenset({Process.SERVER}),
        "docs": "",
        "counters": (Counter("done", "times"),),
    }
    return MadeUpPatch(name=name, rows=rows or (Fit(releases=releases, seams=own),), **{**given, **fields})


def resolved(
    *on: Patch, off: tuple[Patch, ...] = (), options: Mapping[str, Options] | None = None, on_unsupported: Any = "warn"
) -> Resolved:
    """A resolved configuration in which these are on with their defaults."""
    given = options or {}
    return Resolved(
        enabled={each.name: given.get(each.name, each.options()) for each in on},
        off={each.name: "made off" for each in off},
        origins={each.name: "a test" for each in (*on, *off)},
        on_unsupported=on_unsupported,
    )


def states() -> dict[str, State]:
    """The state of every patch in this process's ledger."""
    return {entry.patch.name: entry.state for entry in LEDGER}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    """A made-up upstream and a ledger and installer that know only what the test brings."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setattr(install, "_installed", {})
    monkeypatch.setattr(LEDGER, "_entries", {})
    monkeypatch.setattr(LEDGER, "_listeners", [])
    return Upstream(folder, monkeypatch)
