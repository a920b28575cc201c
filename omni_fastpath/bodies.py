"""Bodies of upstream's functions as hashes: of the whole, to pin it, and of each statement, to say what changed.

The statements of each body that was read stand in ``patches/NAME/bodies.json``, a line for each fingerprint, made by
``omni-fastpath seams --write-bodies`` on a release where the fingerprint is found. Nothing of upstream's text is kept.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import itertools
import json
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

_PATCHES = Path(__file__).parent / "patches"

IN_A_CHECKOUT = (Path(__file__).parents[1] / "pyproject.toml").is_file()
"""Whether what is kept here can be written: an installed package is not."""


class SourceError(Exception):
    """The source of a function is not to be had; the message says of which, and why."""


class Statement(NamedTuple):
    """A logical line of a function, its head and each decorator included.

    Attributes:
        digest: Hash of its tokens, without layout; how deep it stands does not count.
        first: Its first line in the file, from one.
        last: Its last line.
    """

    digest: str
    first: int
    last: int


def fingerprint(function: Any) -> str:
    """A short hash of a function's source, decorators included, that comments, docstrings and layout do not change.

    Taken from the source's tokens and not from byte code or an AST dump, which differ between Python releases.

    Raises:
        SourceError: The source is not to be had.
    """
    tokens, _ = _meaning(function)
    return _hash([token.text for token in tokens], 16)


def statements(function: Any) -> list[Statement]:
    """The statements of the same source, in order; a block's head is one by itself.

    Raises:
        SourceError: The source is not to be had.
    """
    tokens, line = _meaning(function)
    ends = {*_STRUCTURE.values()}
    runs = itertools.groupby((token for token in tokens if token.first >= line), key=lambda token: token.text in ends)
    found = [list(run) for is_end, run in runs if not is_end]
    return [Statement(_hash([token.text for token in run], 8), run[0].first, run[-1].last) for run in found]


def what_changed(found: Sequence[Statement], read: Sequence[str], file: str) -> str:
    """In words: which of the statements found are not among those of a body that was read, and how many are gone."""
    new: list[Statement] = []
    gone = 0
    for tag, old_begin, old_end, begin, end in _matched(found, read).get_opcodes():
        if tag != "equal":
            new += found[begin:end]
            gone += old_end - old_begin
    if not new and not gone:
        return f"its {len(found)} statements are the same, at other depths"
    lines = _ranges(new)
    where = f" ({'line' if lines.isdigit() else 'lines'} {lines} of {file})" if new else ""
    return f"{len(new)} of {len(found)} statements {_are(len(new))} new{where}, {gone} {_are(gone)} gone"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def nearest(found: Sequence[Statement], read: Sequence[Sequence[str]]) -> Sequence[str]:
    """Of several bodies that were read the one with most in common."""
    return max(read, key=lambda one: _matched(found, one).ratio())


def stored(patch: str) -> dict[str, list[str]]:
    """The statements of each body of a patch's seams that was read, by fingerprint."""
    try:
        text = (_PATCHES / patch / "bodies.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {body: digests.split() for body, digests in json.loads(text).items()}


def store(patch: str, bodies: Mapping[str, Sequence[str]]) -> Path:
    """Write them; what is not given is forgotten."""
    file = _PATCHES / patch / "bodies.json"
    text = json.dumps({body: " ".join(bodies[body]) for body in sorted(bodies)}, indent=1)
    file.write_text(f"{text}\n", encoding="utf-8")
    return file


def _matched(found: Sequence[Statement], read: Sequence[str]) -> SequenceMatcher[str]:
    return SequenceMatcher(None, list(read), [statement.digest for statement in found], autojunk=False)


def _ranges(found: Sequence[Statement]) -> str:
    """Their lines, as ``812-815, 830``."""
    lines = sorted({line for one in found for line in range(one.first, one.last + 1)})
    runs = [list(run) for _, run in itertools.groupby(enumerate(lines), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs)


def _hash(texts: Sequence[str], digits: int) -> str:
    # No token contains a NUL, so that different sequences stay different.
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:digits]


# ---- Tokens ----


class _Token(NamedTuple):
    text: str
    first: int
    last: int


_LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
# One name for each, whatever blanks stand for it: the depth of a block is meaning, its width is not.
_STRUCTURE = {tokenize.NEWLINE: "NEWLINE\n", tokenize.INDENT: "INDENT\n", tokenize.DEDENT: "DEDENT\n"}


def _meaning(function: Any) -> tuple[list[_Token], int]:
    """The source's tokens without layout and docstrings, and the line where it begins in its file."""
    try:
        lines, line = inspect.getsourcelines(function)
        source, above = "".join(lines), line - 1
        if source[:1].isspace():
            source, above = f"if True:\n{source}", above - 1  # a method stands deeper than a module's functions
        return [_Token(text, above + first, above + last) for first, last, text in _telling(source)], line
    except (OSError, TypeError, SyntaxError, tokenize.TokenError) as error:
        raise SourceError(f"{function!r}: its source cannot be read ({error})") from error


def _telling(source: str) -> Iterator[tuple[int, int, str]]:
    """First and last row and text of each."""
    docstrings = list(_docstrings(source))
    skip_end = False
    for start, end, kind, text in _tokens(source):
        if any(first <= start and end <= last for first, last in docstrings):
            skip_end = True
        elif kind not in _LAYOUT:
            # What ends the statement that was the docstring goes with it.
            if not (skip_end and (kind == tokenize.NEWLINE or text == ";")):
                yield start[0], end[0], _STRUCTURE.get(kind, text)
            skip_end = False


_Place = tuple[int, int]


def _docstrings(source: str) -> Iterator[tuple[_Place, _Place]]:
    """Where each docstring begins and ends, as the tokenizer counts: rows from one, columns in characters."""
    lines = source.split("\n")

    def place(row: int, column: int) -> _Place:
        return row, len(lines[row - 1].encode()[:column].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = node.body[0]
            if isinstance(first, ast.Expr) and ast.get_docstring(node, clean=False) is not None:
                string = first.value
                yield (
                    place(string.lineno, string.col_offset),
                    place(string.end_lineno or string.lineno, string.end_col_offset or 0),
                )


def _tokens(source: str) -> Iterator[tuple[_Place, _Place, int, str]]:
    """The tokens, an f-string as one, as Python below 3.12 has it: begin, end, type, text."""
    lines = source.split("\n")
    depth, begin = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            depth, begin = depth + 1, begin if depth else token.start
        elif kind == "FSTRING_END":
            depth -= 1
            if not depth:
                yield begin, token.end, tokenize.STRING, _between(lines, begin, token.end)
        elif not depth:
            yield token.start, token.end, token.type, token.string


def _between(lines: list[str], begin: _Place, end: _Place) -> str:
    (first, left), (last, right) = begin, end
    if first == last:
        return lines[first - 1][left:right]
    return "\n".join((lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]))
