"""Bodies as hashes: of the whole, and of each statement."""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import bodies
from omni_fastpath.bodies import fingerprint, nearest, statements, what_changed
from tests.fakes.upstream import Upstream, load, upstream

__all__ = ["upstream"]


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


# ---- Statements ----


def _statements(folder: Path, source: str, name: str = "f") -> list[bodies.Statement]:
    folder.mkdir(exist_ok=True)
    return statements(functools.reduce(getattr, name.split("."), load(folder, source)))


def _changed(folder: Path, source: str) -> str:
    """What is said of a function with this source beside ``BODY``."""
    read = [statement.digest for statement in _statements(folder / "read", BODY)]
    return what_changed(_statements(folder / "found", source), read, "up/stream.py")


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_layout_does_not_count_in_statements(tmp_path: Path, source: str) -> None:
    """What leaves the fingerprint as it is leaves every statement as it is."""
    found, read = _statements(tmp_path / "a", source), _statements(tmp_path / "b", BODY)
    assert [statement.digest for statement in found] == [statement.digest for statement in read]


def test_a_statement_stands_at_its_lines(tmp_path: Path) -> None:
    """Lines are the file's; a statement over several has all of them, a block's head is one by itself."""
    source = (
        "\n\nclass C:\n    @property\n    def f(self):\n        if self:\n            return [\n1]\n        return 2\n"
    )
    folder = tmp_path / "a"
    folder.mkdir()
    found = statements(vars(load(folder, source).C)["f"].fget)
    assert [(first, last) for _, first, last in found] == [(4, 4), (5, 5), (6, 6), (7, 8), (9, 9)]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (BODY.replace("total = 0", "total = 1"), "1 of 9 statements is new (line 4 of up/stream.py), 1 is gone"),
        (BODY.replace("    total = 0\n", ""), "0 of 8 statements are new, 1 is gone"),
        (
            BODY.replace('"a b#c"', "[\n  1,\n  2]").replace("    return [", "    more = 1\n    return ["),
            "2 of 10 statements are new (lines 8-10, 14 of up/stream.py), 1 is gone",
        ),
        (OTHER["depth of the return"], "its 9 statements are the same, at other depths"),
    ],
)
def test_what_changed_is_told_in_lines(tmp_path: Path, source: str, told: str) -> None:
    """New statements with their lines, and how many are gone; what only moved to another depth is neither."""
    assert _changed(tmp_path, source) == told


def test_of_several_bodies_the_nearest_is_taken(tmp_path: Path) -> None:
    """A seam that names the bodies of several releases is compared with the one that has most in common."""
    found = _statements(tmp_path / "a", BODY)
    same, other = [statement.digest for statement in found], ["00000000"] * len(found)
    assert nearest(found, [other, same]) is same


def test_stored_statements_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each body; a patch without a file has none."""
    monkeypatch.setattr(bodies, "_PATCHES", tmp_path)
    (tmp_path / "some").mkdir()
    assert bodies.stored("some") == {}
    file = bodies.store("some", {"b": ["1", "2"], "a": ["3"]})
    assert json.loads(file.read_text()) == {"a": "3", "b": "1 2"}
    assert bodies.stored("some") == {"a": ["3"], "b": ["1", "2"]}
