"""Slots: found, checked against their declaration, written and put back."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrapt import FunctionWrapper

from omni_fastpath.declare import Add, Call, Pin, Reads, Seam, Wrap
from omni_fastpath.seams import MARK, SeamMovedError, verify
from tests.fakes.upstream import ADDED, CHECK, LISTEN, MAKE, MODULE, RUN, TESTED, Upstream, load, passes, upstream

__all__ = ["upstream"]

PINNED = Pin(MODULE, "Loop.run")


@pytest.mark.parametrize(
    ("seam", "read", "message"),
    [
        (Call("made_up_missing", "Loop.run"), [], "the module cannot be imported"),
        (Call(MODULE, "Gone.run"), [], "has no 'Gone'"),
        (Call(MODULE, "Loop.gone"), [], "itself has no 'gone'"),
        (Call(MODULE, "Loop.inherited"), [], "itself has no 'inherited'"),
        (Call(MODULE, "Loop.constant"), ["function(self)"], r"is int, expected function\(self\)"),
        (MAKE, ["function(cls, size)"], r"is classmethod\(cls, size\), expected function\(cls, size\)"),
        (RUN, ["staticmethod(self, rounds)"], r"is function\(self, rounds\), expected staticmethod\(self, rounds\)"),
        (LISTEN, ["function(backlog, port)"], "is function"),
        (Call(MODULE, "Base.inherited"), [], r"is function\(self\), expected not read there"),
        (PINNED, ["function(self, rounds)", "0123456789abcdef"], "its body has changed: .* expected 0123456789abcdef"),
    ],
)
def test_what_moved_is_refused(upstream: Upstream, seam: Seam, read: list[str], message: str) -> None:
    """Any difference is reported with the slot, what was found and what was expected."""
    if read:
        upstream.read(seam.path, *read)
    with pytest.raises(SeamMovedError, match=message) as caught:
        verify(seam, TESTED)
    assert str(caught.value).startswith(f"{seam.path}: ")


def test_added_slot_needs_its_owner_only(upstream: Upstream) -> None:
    """An attribute to be added may be absent, but its class may not."""
    verify(ADDED, TESTED)
    with pytest.raises(SeamMovedError, match="has no 'Gone'"):
        verify(Add(MODULE, "Gone.added", function="added"), TESTED)


@pytest.mark.parametrize("seam", [RUN, MAKE, CHECK])
def test_slot_that_another_patch_wraps_answers_as_what_it_wraps(upstream: Upstream, seam: Wrap) -> None:
    """A slot with another patch's wrapper has upstream's kind, parameters and fingerprint."""
    slot, pinned = verify(seam, TESTED), Pin(MODULE, seam.qualname)
    wrapper = FunctionWrapper(slot.raw(), passes)
    setattr(wrapper, MARK, "another")
    slot.write(wrapper)
    assert verify(pinned, TESTED, exact=True).raw() is wrapper


def test_body_without_source_cannot_be_pinned(upstream: Upstream) -> None:
    """A function without readable source counts as changed if its body matters."""
    exec(compile("def run(self, rounds): pass", "no file", "exec"), space := {})  # type: ignore[var-annotated]  # noqa: S102
    upstream.module.Loop.run = space["run"]
    verify(RUN, TESTED)
    for seam, exact in ((PINNED, False), (RUN, True)):
        with pytest.raises(SeamMovedError, match="its source cannot be read"):
            verify(seam, TESTED, exact=exact)


# ---- Attributes that are read ----

DECLARES = """
import dataclasses, functools, typing
import msgspec

def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@dataclasses.dataclass
class Base:
    field: int
    made: list = dataclasses.field(default_factory=list)

class Struct(msgspec.Struct):
    member: int

class State(Base):
    annotated: int
    constant = 7
    @noted
    def __init__(self, other):
        self.assigned, other.of_another = 1, 2
        self.typed: int = 3
        if other:
            with open("x") as self.opened:
                self.added += 1
    def later(this, self):
        this.set_later = self.set_of_another = 1
        return this.only_read
    @property
    def computed(self):
        return 1
"""


def test_attributes_that_a_class_declares_are_found(upstream: Upstream, tmp_path: Path) -> None:
    """Fields, annotations, class attributes and what methods assign to their first argument count, also in bases."""
    pytest.importorskip("msgspec")  # which vLLM brings
    upstream.module_is(load(tmp_path, DECLARES, "made_up_state"))
    own = ("field", "made", "annotated", "constant", "later", "computed", "assigned", "typed", "opened", "added")
    verify(Reads("made_up_state", "State", (*own, "set_later")), TESTED)
    verify(Reads("made_up_state", "Struct", ("member",)), TESTED)
    lacking = ("of_another", "set_of_another", "only_read", "nowhere")
    with pytest.raises(SeamMovedError, match=f"class does not declare {', '.join(lacking)}$"):
        verify(Reads("made_up_state", "State", ("field", *lacking)), TESTED)
    with pytest.raises(SeamMovedError, match="itself has no 'Gone'"):
        verify(Reads("made_up_state", "Gone", ("field",)), TESTED)
