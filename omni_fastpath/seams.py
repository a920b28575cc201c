"""Slots of upstream's: finding them, checking that they look as declared, writing them and putting them back.

The raw slot is what stands in the owner's ``__dict__``; ``getattr`` would bind it, and an undo that writes back a
bound method breaks the class (``style.md`` records the trials behind this).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import tokenize
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from omni_fastpath.declare import Seam, SeamKind

MARK = "_omni_fastpath_patch"
"""Attribute of every object that we put into a slot: the name of its patch."""

_ABSENT = object()


class SeamMovedError(Exception):
    """A slot does not look as its declaration says; the message names the slot, what was found and expected."""


class SlotTakenError(Exception):
    """A slot holds somebody else's object on top of ours, so that ours cannot be taken off."""


@dataclass(frozen=True)
class Slot:
    """A resolved seam: the object that owns the slot and the name in its ``__dict__``."""

    seam: Seam
    owner: Any
    name: str

    def raw(self) -> Any:
        """What stands in the owner's own ``__dict__``; ``_ABSENT`` if nothing does."""
        return vars(self.owner).get(self.name, _ABSENT)

    @property
    def present(self) -> bool:
        """Whether the owner itself has the slot."""
        return self.raw() is not _ABSENT

    def holds(self, value: Any) -> bool:
        """Whether the slot holds exactly this object."""
        return self.raw() is value

    def write(self, value: Any) -> None:
        """Put ``value`` into the slot."""
        setattr(self.owner, self.name, value)

    def restore(self, raw: Any, *, ours: Any) -> None:
        """Put back the saved raw slot.

        Raises:
            SlotTakenError: Somebody wrote the slot after us; taking ours off would take theirs off too.
        """
        if not self.holds(ours):
            raise SlotTakenError(f"{self.seam.path} was written by someone else after us: found {self.raw()!r}")
        if raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, raw)


def find(seam: Seam) -> Slot:
    """Import the seam's module and walk to its slot.

    Raises:
        SeamMovedError: The module or one of the names on the way is gone.
    """
    try:
        owner: Any = importlib.import_module(seam.module)
    except ImportError as error:
        raise SeamMovedError(f"{seam.path}: the module cannot be imported ({error})") from error
    *parents, name = seam.qualname.split(".")
    for parent in parents:
        found = vars(owner).get(parent, _ABSENT)
        if found is _ABSENT:
            raise SeamMovedError(f"{seam.path}: {owner!r} has no {parent!r}")
        owner = found
    return Slot(seam, owner, name)


def verify(seam: Seam) -> Slot:
    """Check that a slot looks as declared: owner, raw slot, descriptor kind, parameter names, fingerprint.

    Raises:
        SeamMovedError: It does not; the message says what was found and what was expected.
    """
    slot = find(seam)
    if seam.kind is SeamKind.ADD:
        return slot
    raw = slot.raw()
    if raw is _ABSENT:
        raise SeamMovedError(f"{seam.path}: {slot.owner!r} itself has no {slot.name!r}")
    found = _descriptor(raw)
    if found != seam.descriptor:
        raise SeamMovedError(f"{seam.path}: is a {found}, expected a {seam.descriptor}")
    function = inspect.unwrap(raw.__func__ if seam.descriptor != "function" else raw)
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != seam.parameters:
        raise SeamMovedError(f"{seam.path}: its parameters are {parameters}, expected {seam.parameters}")
    if seam.fingerprints:
        body = fingerprint(function)
        if body not in seam.fingerprints:
            raise SeamMovedError(f"{seam.path}: its body moved: fingerprint {body}, expected {seam.fingerprints}")
    return slot


def _descriptor(raw: Any) -> str:
    if isinstance(raw, classmethod):
        return "classmethod"
    if isinstance(raw, staticmethod):
        return "staticmethod"
    # A wrapt wrapper of ours (another patch on the same slot) answers as the function that it wraps.
    return "function" if isinstance(inspect.unwrap(raw), FunctionType) else type(raw).__name__


def fingerprint(function: Any) -> str:
    """A short hash of a function's source that comments, docstrings and layout do not change.

    Taken from the source text and not from byte code or an AST dump, which differ between Python releases.

    Raises:
        SeamMovedError: The source is not to be had.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise SeamMovedError(f"{function!r}: its source cannot be read ({error})") from error
    source = inspect.cleandoc("\n" + source) if source[:1].isspace() else source
    return hashlib.sha256(_normalise(source).encode()).hexdigest()[:16]


def _normalise(source: str) -> str:
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            doc = node.body[0]
            for row in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1):
                lines[row - 1] = ""
    # Indentation is meaning in Python; the number of blanks per level is not, and neither are blanks inside a line.
    kept = []
    for line in lines:
        text = "".join(line.split())
        if text:
            kept.append(f"{len(line) - len(line.lstrip())}:{text}")
    return "\n".join(kept)
