"""Slots: found, checked against their declaration, written and put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.declare import Add, AnySeam, Relies
from omni_fastpath.seams import SeamMovedError, fingerprint, verify
from tests.fakes.upstream import ADDED, MAKE, MODULE, RUN, TESTED, Upstream, load, upstream

__all__ = ["upstream"]

OTHER = ["0123456789abcdef"]


@pytest.mark.parametrize(
    ("seam", "read", "message"),
    [
        (Relies("made_up_missing", "Loop.run"), [], "the module cannot be imported"),
        (Relies(MODULE, "Gone.run"), [], "has no 'Gone'"),
        (Relies(MODULE, "Loop.gone"), [], "itself has no 'gone'"),
        (Relies(MODULE, "Loop.inherited"), [], "itself has no 'inherited'"),
        (Relies(MODULE, "Base.inherited"), [], "it has changed: .* expected not read there"),
        (RUN, OTHER, "it has changed: found [0-9a-f]{16}, expected 0123456789abcdef$"),
        (MAKE, OTHER * 2, "it has changed: .* expected 0123456789abcdef or 0123456789abcdef"),
        (Relies(MODULE, "listen"), OTHER, "it has changed"),
        (Relies(MODULE, "Loop"), OTHER, "it has changed"),
    ],
)
def test_what_moved_is_refused(upstream: Upstream, seam: AnySeam, read: list[str], message: str) -> None:
    """Any difference is reported with the slot, what was found and what was expected."""
    if read:
        verify(seam, TESTED)
        upstream.read(seam.path, *read)
    with pytest.raises(SeamMovedError, match=message) as caught:
        verify(seam, TESTED)
    assert str(caught.value).startswith(f"{seam.path}: ")


def test_a_library_s_function_that_is_wrapped_counts_by_its_parameters(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any version of a library may be installed. What is relied on counts by its body."""
    monkeypatch.setattr("omni_fastpath.seams.UPSTREAM", {"another"})
    upstream.read(RUN.path, "(self, rounds)")
    verify(RUN, TESTED)
    for seam, read in ((RUN, "(self)"), (Relies(MODULE, RUN.qualname), "(self, rounds)")):
        upstream.read(RUN.path, read)
        with pytest.raises(SeamMovedError, match="it has changed"):
            verify(seam, TESTED)


def test_added_slot_needs_its_owner_only(upstream: Upstream) -> None:
    """An attribute to be added may be absent, but its class may not."""
    verify(ADDED, TESTED)
    with pytest.raises(SeamMovedError, match="has no 'Gone'"):
        verify(Add(MODULE, "Gone.added", function="added"), TESTED)


def test_a_body_without_source_has_changed(upstream: Upstream) -> None:
    """A function whose source cannot be read counts as changed."""
    exec(compile("def run(self, rounds): pass", "no file", "exec"), space := {})  # type: ignore[var-annotated]  # noqa: S102
    upstream.module.Loop.run = space["run"]
    with pytest.raises(SeamMovedError, match="its source cannot be read"):
        verify(RUN, TESTED)


# ---- The attributes of a class ----

DECLARES = """
import dataclasses, functools

@dataclasses.dataclass
class Base:
    field: int
    made: list = dataclasses.field(default_factory=list)

@functools.total_ordering
class State(Base):
    'What it is.'
    annotated: int
    constant, other_constant = 7, 8
    def __init__(self, other):
        self.assigned, other.of_another = 1, 2
        self.typed: int = 3
        if other:
            with open("x") as self.opened:
                self.added += 1
    @property
    def computed(self):
        return 1
    def method(self):
        return self.assigned
    def __lt__(self, other):
        return False
"""
SAME = {"body": ("return 1", "return 2"), "method": ("def method", "def another"), "docstring": ("What", "All")}
NAMES = ("field:", "made:", "annotated:", "constant,", ".assigned,", ".typed:", ".opened:", ".added ", "computed(")


def test_the_attributes_of_a_class_are_its_fingerprint(upstream: Upstream, tmp_path: Path) -> None:
    """Fields, class attributes, properties and what is assigned to ``self`` count, also in bases. Bodies do not."""

    def of(source: str) -> str:
        upstream.module_is(module := load(tmp_path, source))
        return fingerprint(module.State)

    assert {of(DECLARES.replace(*change)) for change in SAME.values()} == {of(DECLARES)}
    others = [of(DECLARES.replace(name, f"{name[:-1]}_2{name[-1]}")) for name in NAMES]
    assert len({of(DECLARES), *others}) == len(NAMES) + 1


# ---- The body of a function ----


BODY = '''
def f(self, items, *, limit=3):
    """What it does."""
    total = 0
    for item in items:
        if item > limit and not item == 5:
            total += item
    text = "a b#c"
    def inner(x):
        """Inside."""
        return f"{x:>3} of {limit}"
    return [total, text, inner(total)]
'''

LAYOUT = {
    "comments": BODY.replace("total = 0", "total = 0  # none yet\n    # and one more"),
    "another docstring": BODY.replace(
        "What it does.", "A longer one,\n\n    with # and 'quotes'\n  and less indented.\n"
    ),
    "no nested docstring": BODY.replace('        """Inside."""\n', ""),
    "another indentation": BODY.replace("    ", "  "),
    "broken line": BODY.replace("[total, text, ", "[\n        total, text,\n     "),
}

BODIES = {
    "value": BODY.replace("total = 0", "total = 1"),
    "behind a hash in a string": BODY.replace('"a b#c"', '"a b#d"'),
    "blank inside an f-string": BODY.replace("} of {", "}of {"),
    "depth of the return": BODY.replace("    return [", "        return ["),
    "words joined": BODY.replace("not item == 5", "notitem == 5"),
    "decorator": "import functools\n" + BODY.replace("def f", "@functools.lru_cache\ndef f"),
    "string that is no docstring": BODY.replace("total = 0", 'total = 0\n    "Not a docstring."'),
}


@pytest.mark.parametrize("change", LAYOUT | BODIES)
def test_a_fingerprint_is_that_of_what_a_body_does(tmp_path: Path, change: str) -> None:
    """Comments, docstrings, indentation widths and line breaks leave it the same constant on every Python.

    Two bodies that do different things never share it.
    """
    source = (LAYOUT | BODIES)[change]
    assert source != BODY
    found = fingerprint(load(tmp_path, source).f)
    assert (found == "94d0182024a5ca7c") is (change in LAYOUT), found
