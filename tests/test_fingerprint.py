"""Fingerprints of upstream's functions: what changes them and what does not."""

from __future__ import annotations

import functools
import textwrap
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.seams import fingerprint
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
    "another docstring": BODY.replace(
        "What it does.", "A longer one,\n\n    with # and 'quotes'\n  and less indented.\n    "
    ),
    "no nested docstring": BODY.replace('        """Inside."""\n', ""),
    "another indentation": BODY.replace("    ", "  "),
    "broken line": BODY.replace("[total, text, ", "[\n        total, text,\n     "),
}

OTHER = {
    "value": BODY.replace("total = 0", "total = 1"),
    "behind a hash in a string": BODY.replace('"a b#c"', '"a b#d"'),
    "blank inside an f-string": BODY.replace("} of {", "}of {"),
    "depth of the return": BODY.replace("    return [", "        return ["),
    "words joined": BODY.replace("not item == 5", "notitem == 5"),
    "decorator": "import functools\n" + BODY.replace("def f", "@functools.lru_cache\ndef f"),
    "string that is no docstring": BODY.replace("total = 0", 'total = 0\n    "Not a docstring."'),
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


def test_method_with_a_string_at_the_margin_can_be_pinned(tmp_path: Path) -> None:
    """A method with a multi-line string at the left margin can be read."""
    source = 'class C:\n    def f(self):\n        """Doc.\nat the margin"""\n        return """one\ntwo"""\n'
    moved = source.replace("two", "three")
    plain = source.replace("Doc.\nat the margin", "Doc")
    first = body_hash(tmp_path / "a", source, "C.f")
    assert first == body_hash(tmp_path / "b", plain, "C.f") != body_hash(tmp_path / "c", moved, "C.f")


def test_fingerprint_is_the_same_on_every_python(tmp_path: Path) -> None:
    """The fingerprint of a known body is the same constant on every Python."""
    assert body_hash(tmp_path / "a", BODY) == "94d0182024a5ca7c"


def test_wrapper_has_the_fingerprint_of_its_function(tmp_path: Path, upstream: Upstream) -> None:
    """``inspect`` looks through functools wrappers, so another package's wrapper does not change the fingerprint."""
    plain: Any = upstream.module.Loop.run

    @functools.wraps(plain)
    def foreign(*args: Any) -> Any:
        return plain(*args)

    assert fingerprint(foreign) == fingerprint(plain)
