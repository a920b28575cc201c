"""Slots: found, checked against their declaration, written and put back."""

from __future__ import annotations

import inspect

import pytest
from wrapt import FunctionWrapper

from omni_fastpath.declare import Add, Call, Function, Pin, Seam
from omni_fastpath.seams import MARK, SeamMovedError, fingerprint, verify
from tests.fakes.upstream import ADDED, CHECK, MAKE, MODULE, RUN, Upstream, passes, upstream

__all__ = ["upstream"]


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Call("made_up_missing", "Loop.run", ()), "the module cannot be imported"),
        (Call(MODULE, "Gone.run", ()), "has no 'Gone'"),
        (Call(MODULE, "Loop.constant.run", ()), "itself has no 'run'"),
        (Call(MODULE, "Loop.gone", ()), "itself has no 'gone'"),
        (Call(MODULE, "Loop.inherited", ("self",)), "itself has no 'inherited'"),
        (Call(MODULE, "Loop.constant", ()), "is a int, expected a function"),
        (Call(MODULE, "Loop.make", ("cls", "size")), "is a classmethod, expected a function"),
        (Call(MODULE, "Loop.run", ("self", "rounds"), descriptor="staticmethod"), "is a function, expected a static"),
        (Call(MODULE, "Loop.run", ("self",)), r"its parameters are \('self', 'rounds'\), expected \('self',\)"),
        (Call(MODULE, "listen", ("backlog", "port")), "its parameters are"),
        (Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=("0123456789abcdef",)), "its body moved"),
    ],
)
def test_what_moved_is_refused(upstream: Upstream, seam: Seam, message: str) -> None:
    """Whatever differs is named with the slot, what was found and what was expected."""
    with pytest.raises(SeamMovedError, match=message) as caught:
        verify(seam)
    assert str(caught.value).startswith(f"{seam.path}: ")


def test_added_slot_needs_its_owner_only(upstream: Upstream) -> None:
    """What is to be added may be absent; the class that gets it may not."""
    assert not verify(ADDED).present
    with pytest.raises(SeamMovedError, match="has no 'Gone'"):
        verify(Add(MODULE, "Gone.added", function="added"))


@pytest.mark.parametrize("name", ["run", "make", "check"])
def test_slot_that_another_patch_wraps_answers_as_what_it_wraps(upstream: Upstream, name: str) -> None:
    """With a wrapper of ours in the slot descriptor, parameters and fingerprint are upstream's still."""
    seam: Function = {"run": RUN, "make": MAKE, "check": CHECK}[name]
    slot = verify(seam)
    bare = inspect.unwrap(getattr(upstream.module.Loop, name))
    pinned = Pin(MODULE, seam.qualname, seam.parameters, fingerprints=(fingerprint(bare),), descriptor=seam.descriptor)
    wrapper = FunctionWrapper(slot.raw(), passes)
    setattr(wrapper, MARK, "another")
    slot.write(wrapper)
    assert verify(pinned).holds(wrapper)


def test_body_without_source_cannot_be_pinned(upstream: Upstream) -> None:
    """A function whose source is not to be had has moved, when its body matters."""
    exec(compile("def run(self, rounds): pass", "no file", "exec"), space := {})  # type: ignore[var-annotated]  # noqa: S102
    upstream.module.Loop.run = space["run"]
    verify(RUN)
    with pytest.raises(SeamMovedError, match="its source cannot be read"):
        verify(Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=("0123456789abcdef",)))
