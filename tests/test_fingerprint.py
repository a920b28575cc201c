"""Fingerprints of upstream's functions: what changes them and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.seams import fingerprint
from tests.fakes.upstream import load


def body_hash(folder: Path, source: str) -> str:
    """The fingerprint of the function in a module with this source."""
    folder.mkdir(exist_ok=True)
    return fingerprint(load(folder, source).f)


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


def test_fingerprint_is_the_same_on_every_python(tmp_path: Path) -> None:
    """The fingerprint of a known body is the same constant on every Python."""
    assert body_hash(tmp_path / "a", BODY) == "94d0182024a5ca7c"
