"""Slots: found, checked against their declaration, written and put back."""

from __future__ import annotations

import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from wrapt import FunctionWrapper

from omni_fastpath.declare import Add, Call, Function, Pin, Seam
from omni_fastpath.seams import MARK, SeamMovedError, SlotTakenError, find, fingerprint, verify
from tests.fakes.upstream import ADDED, CHECK, EVENTS, LISTEN, MAKE, MODULE, RUN, Upstream, load, passes, upstream

__all__ = ["upstream"]

SEAMS = {"function": LISTEN, "method": RUN, "classmethod": MAKE, "staticmethod": CHECK, "coroutine": EVENTS}


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_what_is_as_declared_passes(upstream: Upstream, seam: Seam) -> None:
    """Each kind of slot is found with its raw object, the one in the owner's own dictionary."""
    slot = verify(seam)
    owner = upstream.module if seam is LISTEN else upstream.module.Loop
    assert slot.owner is owner
    assert slot.holds(vars(owner)[slot.name])
    assert slot.present


@pytest.mark.parametrize(
    ("seam", "message"),
    [
        (Call("made_up_missing", "Loop.run", ()), "the module cannot be imported"),
        (Call(f"{MODULE}.inner", "Loop.run", ()), "the module cannot be imported"),
        (Call(MODULE, "Gone.run", ()), "has no 'Gone'"),
        (Call(MODULE, "Loop.Inner.run", ()), "has no 'Inner'"),
        (Call(MODULE, "Loop.constant.run", ()), "itself has no 'run'"),
        (Call(MODULE, "nothing.inner.run", ()), "has no 'inner'"),
        (Call(MODULE, "Loop.gone", ()), "itself has no 'gone'"),
        (Call(MODULE, "Loop.inherited", ("self",)), "itself has no 'inherited'"),
        (Call(MODULE, "Loop.constant", ()), "is a int, expected a function"),
        (Call(MODULE, "Base", ()), "is a type, expected a function"),
        (Call(MODULE, "nothing", ()), "is a NoneType, expected a function"),
        (Call(MODULE, "Loop.make", ("cls", "size")), "is a classmethod, expected a function"),
        (Call(MODULE, "Loop.check", ("value",)), "is a staticmethod, expected a function"),
        (Call(MODULE, "Loop.run", ("self", "rounds"), descriptor="staticmethod"), "is a function, expected a static"),
        (
            Call(MODULE, "Loop.run", ("self", "turns")),
            r"parameters are \('self', 'rounds'\), expected \('self', 'turns'",
        ),
        (Call(MODULE, "Loop.run", ("self",)), "its parameters are"),
        (Call(MODULE, "listen", ("backlog", "port")), "its parameters are"),
        (Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=("0123456789abcdef",)), "its body moved"),
    ],
)
def test_what_moved_is_refused(upstream: Upstream, seam: Seam, message: str) -> None:
    """Whatever differs is named with the slot, what was found and what was expected."""
    with pytest.raises(SeamMovedError, match=message) as caught:
        verify(seam)
    assert str(caught.value).startswith(f"{seam.path}: ")


def test_any_accepted_fingerprint_will_do(upstream: Upstream) -> None:
    """A seam may name the bodies of several releases."""
    found = fingerprint(upstream.module.Loop.run)
    verify(Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=("0123456789abcdef", found)))


def test_added_slot_needs_its_owner_only(upstream: Upstream) -> None:
    """What is to be added may be absent; the class that gets it may not."""
    assert not verify(ADDED).present
    with pytest.raises(SeamMovedError, match="has no 'Gone'"):
        verify(Add(MODULE, "Gone.added", function="added", probe="difference"))


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
    slot.write(FunctionWrapper(wrapper, passes))
    with pytest.raises(SeamMovedError, match="somebody else's wrapper"):
        verify(pinned)


def test_body_without_source_cannot_be_pinned(upstream: Upstream) -> None:
    """A function whose source is not to be had has moved, when its body matters."""
    exec("def run(self, rounds): pass", space := {})  # type: ignore[var-annotated]  # noqa: S102
    upstream.module.Loop.run = space["run"]
    verify(RUN)
    with pytest.raises(SeamMovedError, match="its source cannot be read"):
        verify(Pin(MODULE, "Loop.run", ("self", "rounds"), fingerprints=("0123456789abcdef",)))


# ---- Putting back ----


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_restored_slot_holds_the_raw_object(upstream: Upstream, seam: Seam) -> None:
    """Writing and restoring leaves every owner's dictionary as it was, object by object."""
    before = upstream.slots()
    slot = find(seam)
    raw, ours = slot.raw(), FunctionWrapper(slot.raw(), passes)
    slot.write(ours)
    assert slot.holds(ours)
    slot.restore(raw, ours=ours)
    after = upstream.slots()
    assert {owner: list(held) for owner, held in after.items()} == {owner: list(held) for owner, held in before.items()}
    assert all(after[owner][name] is value for owner, held in before.items() for name, value in held.items())


@pytest.mark.parametrize("name", ["inherited", "added"])
def test_slot_that_was_not_there_is_deleted(upstream: Upstream, name: str) -> None:
    """Restoring over an inherited or an absent attribute deletes ours instead of writing what it was inherited as."""
    slot = find(Call(MODULE, f"Loop.{name}", ("self",)))
    raw = slot.raw()
    assert not slot.present
    slot.write(passes)
    slot.restore(raw, ours=passes)
    assert name not in vars(upstream.module.Loop)
    assert hasattr(upstream.module.Loop, name) == (name == "inherited")


def test_classmethod_still_binds_after_the_undo(upstream: Upstream) -> None:
    """A restored classmethod binds to the subclass that calls it, as a bound method put back would not."""
    slot = find(MAKE)
    raw, ours = slot.raw(), FunctionWrapper(slot.raw(), passes)
    slot.write(ours)
    slot.restore(raw, ours=ours)
    derived: Any = type("Derived", (upstream.module.Loop,), {})
    assert derived.make(3) == (derived, 3)


def test_restore_refuses_to_drop_somebody_elses(upstream: Upstream) -> None:
    """A slot that was written after us is left as it is."""
    slot = find(RUN)
    raw, ours = slot.raw(), FunctionWrapper(slot.raw(), passes)
    slot.write(ours)
    theirs = FunctionWrapper(ours, passes)
    slot.write(theirs)
    with pytest.raises(SlotTakenError, match="written by someone else"):
        slot.restore(raw, ours=ours)
    assert slot.holds(theirs)


# ---- Fingerprints ----


def body_hash(folder: Path, source: str, name: str = "f") -> str:
    """The fingerprint of a function in a module with this source."""
    folder.mkdir(exist_ok=True)
    module = load(folder, textwrap.dedent(source))
    return fingerprint(functools.reduce(getattr, name.split("."), module))


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

SAME = {
    "comments": BODY.replace("total = 0", "total = 0  # none yet\n    # and one more"),
    "no docstring": BODY.replace('    """What it does."""\n', ""),
    "another docstring": BODY.replace(
        "What it does.", "A longer one,\n\n    with # and 'quotes'\n  and less indented.\n    "
    ),
    "docstring in pieces": BODY.replace('"""What it does."""', '"What it " \\\n      "does."'),
    "empty docstring": BODY.replace("What it does.", ""),
    "nested docstring": BODY.replace("Inside.", "Somewhere else."),
    "no nested docstring": BODY.replace('        """Inside."""\n', ""),
    "blank lines": BODY.replace("    total = 0\n", "\n    total = 0\n\n\n"),
    "trailing blanks": BODY.replace("total = 0\n", "total = 0   \n"),
    "blanks in a line": BODY.replace("total = 0", "total   =  0").replace("limit=3", "limit = 3"),
    "another indentation": BODY.replace("    ", "  "),
    "tabs": BODY.replace("    ", "\t"),
    "broken line": BODY.replace("[total, text, ", "[\n        total, text,\n     "),
    "continued line": BODY.replace("text = ", "text = \\\n  "),
}

OTHER = {
    "value": BODY.replace("total = 0", "total = 1"),
    "name": BODY.replace("total", "amount"),
    "operator": BODY.replace("item > limit", "item >= limit"),
    "blank inside a string": BODY.replace('"a b#c"', '"ab#c"'),
    "more blanks inside a string": BODY.replace('"a b#c"', '"a  b#c"'),
    "behind a hash in a string": BODY.replace('"a b#c"', '"a b#d"'),
    "blank inside an f-string": BODY.replace("} of {", "}of {"),
    "format": BODY.replace("x:>3", "x:>4"),
    "expression in an f-string": BODY.replace("{limit}", "{text}"),
    "depth of a line": BODY.replace("            total += item", "        total += item").replace(
        "        if item > limit and not item == 5:\n", "        if item > limit and not item == 5:\n            pass\n"
    ),
    "depth of the return": BODY.replace("    return [", "        return ["),
    "words joined": BODY.replace("not item == 5", "notitem == 5"),
    "decorator": "import functools\n" + BODY.replace("def f", "@functools.lru_cache\ndef f"),
    "default": BODY.replace("limit=3", "limit=4"),
    "async": BODY.replace("def inner", "async def inner"),
    "string that is no docstring": BODY.replace("total = 0", 'total = 0\n    "Not a docstring."'),
    "order": BODY.replace("    total = 0\n", "").replace("    text =", "    total = 0\n    text ="),
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_layout_does_not_count(tmp_path: Path, source: str) -> None:
    """Comments, docstrings, blank lines, indentation widths and line breaks leave the fingerprint as it is."""
    assert source != BODY
    assert body_hash(tmp_path / "a", source) == body_hash(tmp_path / "b", BODY)


@pytest.mark.parametrize("source", OTHER.values(), ids=OTHER)
def test_every_change_of_the_body_counts(tmp_path: Path, source: str) -> None:
    """Two bodies that do different things never share a fingerprint."""
    assert source != BODY
    assert body_hash(tmp_path / "a", source) != body_hash(tmp_path / "b", BODY)


def test_changes_are_told_apart() -> None:
    """The sources above differ pairwise, so that each case stands for itself."""
    assert len({*SAME.values(), *OTHER.values(), BODY}) == len(SAME) + len(OTHER) + 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('def f(): "Doc."; return 1', 'def f(): "Doc."; return 2'),
        ('def f():\n    return """a\n    b"""', 'def f():\n    return """a\n  b"""'),
        ('def f():\n    return """a\n\n    b"""', 'def f():\n    return """a\n    b"""'),
        ('def f():\n    return """a\n    # b"""', 'def f():\n    return """a\n    # c"""'),
        ("def f():\n    return 'a\\x0cb', 1  # x", "def f():\n    return 'a\\x0cb', 2  # x"),
        ("def f():\n    x = '\u2028'; return 1", "def f():\n    x = '\u2028'; return 2"),
        ("def f():\n    if 1:\n        pass\n    return 2", "def f():\n    if 1:\n        pass\n        return 2"),
        ('def f():\n    x = 1\n    "a"', 'def f():\n    x = 1\n    "b"'),
        ("f = lambda: 1", "f = lambda: 2"),
    ],
)
def test_what_a_line_based_hash_would_miss(tmp_path: Path, one: str, other: str) -> None:
    """One-line bodies, multi-line strings, odd line separators in strings and depth all count."""
    assert body_hash(tmp_path / "a", one) != body_hash(tmp_path / "b", other)


def test_docstring_of_a_one_line_body_does_not_count(tmp_path: Path) -> None:
    """What follows the docstring on its line is the body."""
    hashes = [body_hash(tmp_path / "a", f"def f(): {doc}return 1") for doc in ("", '"Doc."; ', "'Other'; ")]
    assert len(set(hashes)) == 1


def test_method_with_a_string_at_the_margin_can_be_pinned(tmp_path: Path) -> None:
    """A multi-line string that stands left of its function does not keep it from being read."""
    source = 'class C:\n    def f(self):\n        """Doc.\nat the margin"""\n        return """one\ntwo"""\n'
    moved = source.replace("two", "three")
    plain = source.replace("Doc.\nat the margin", "Doc")
    first = body_hash(tmp_path / "a", source, "C.f")
    assert first == body_hash(tmp_path / "b", plain, "C.f") != body_hash(tmp_path / "c", moved, "C.f")


def test_fingerprint_is_the_same_on_every_python(tmp_path: Path) -> None:
    """The fingerprint of a known body is a constant: declarations are compared with it on every Python."""
    assert body_hash(tmp_path / "a", BODY) == "8ad4d6be2c28b585"


def test_wrapper_has_the_fingerprint_of_its_function(tmp_path: Path, upstream: Upstream) -> None:
    """``inspect`` looks through functools wrappers, so a foreign one does not move the body."""
    plain: Any = upstream.module.Loop.run

    @functools.wraps(plain)
    def foreign(*args: Any) -> Any:
        return plain(*args)

    assert fingerprint(foreign) == fingerprint(plain)
