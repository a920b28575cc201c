"""Made-up upstream modules and patches on them, for the machinery's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omni_fastpath import install
from omni_fastpath.config import Resolved
from omni_fastpath.declare import Options, Patch, Process, Seam, SeamKind, State
from omni_fastpath.ledger import LEDGER

TESTED = "0.30.0"
PIN = SeamKind.PIN

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

    async def events(self):
        return self.seen()

    def seen(self):
        return "seen"

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
        self.release(TESTED)

    def release(self, version: str | None) -> None:
        """Set the installed release."""
        self._monkeypatch.setattr(install, "installed_release", lambda *_: version)

    def slots(self) -> dict[str, dict[str, Any]]:
        """The raw slots of everything that a patch could write."""
        owners = {"": self.module, "Base": self.module.Base, "Loop": self.module.Loop}
        return {name: dict(vars(owner)) for name, owner in owners.items()}


RUN = Seam(MODULE, "Loop.run", ("self", "rounds"), wrapper="passes")
MAKE = Seam(MODULE, "Loop.make", ("cls", "size"), wrapper="passes", descriptor="classmethod")
CHECK = Seam(MODULE, "Loop.check", ("value",), wrapper="passes", descriptor="staticmethod")
LISTEN = Seam(MODULE, "listen", ("port", "backlog"), wrapper="passes")
EVENTS = Seam(MODULE, "Loop.events", ("self",))
ADDED = Seam(MODULE, "Loop.added", kind=SeamKind.ADD, wrapper="added", probe="difference")
MOVED = Seam(MODULE, "Loop.gone", ("self",), wrapper="passes")


def patch(name: str, *seams: Seam, **fields: Any) -> Patch:
    """A patch on the made-up upstream."""
    given: dict[str, Any] = {
        "summary": "",
        "processes": frozenset({Process.SERVER}),
        "wrappers": "made_up_wrappers",
        "tested": (TESTED,),
        "docs": "",
        "counters": {"done": "times"},
    }
    return Patch(name=name, seams=seams, **{**given, **fields})


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
