"""Find, verify, write and restore slots: attributes of upstream modules and classes.

A slot's raw value is the object in its owner's ``__dict__``. ``getattr`` must not be used, because it binds the object.
If uninstalling wrote back a bound classmethod, calls on subclasses would get the owner as their class, and a function
without its ``staticmethod`` would get a ``self``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

from omni_fastpath.declare import Add, AnySeam, Relies, Replace, Seam, Wrap

FINGERPRINTS = Path(__file__).parent / "fingerprints"
"""One file per release that was read, written by ``scripts/fingerprints.py``."""

UPSTREAM = frozenset({"vllm", "vllm_omni"})
"""The packages of a release."""

MARK = "_self_omni_fastpath"
"""An attribute of this package's wrappers: the name of the patch. wrapt stores ``_self_`` attributes on the wrapper."""

_ABSENT = object()
"""The raw value of a missing slot."""


class SeamMovedError(Exception):
    """A slot differs from its declaration. The message names the slot, what was found and what was expected."""


@dataclass(frozen=True)
class Slot:
    """A resolved seam: the object that owns the slot and the name in its ``__dict__``."""

    seam: Seam
    owner: Any
    name: str

    def raw(self) -> Any:
        """The object in the owner's own ``__dict__``, or ``_ABSENT``."""
        return getattr(self.owner, "__dict__", {}).get(self.name, _ABSENT)

    def write(self, value: Any) -> None:
        """Write a value. Writing the result of ``raw`` restores the slot exactly."""
        if value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def find(seam: Seam) -> Slot:
    """Import the seam's module and walk to its slot.

    Raises:
        SeamMovedError: The module or a part of the path is missing.
    """
    try:
        owner: Any = importlib.import_module(seam.module)
    except ImportError as error:
        raise SeamMovedError(f"{seam.path}: the module cannot be imported ({error})") from error
    return _walk(seam, owner)


def _walk(seam: Seam, owner: Any) -> Slot:
    *parents, name = seam.qualname.split(".")
    for parent in parents:
        found = getattr(owner, "__dict__", {}).get(parent, _ABSENT)
        if found is _ABSENT:
            raise SeamMovedError(f"{seam.path}: {owner!r} has no {parent!r}")
        owner = found
    return Slot(seam, owner, name)


def elsewhere(slot: Slot) -> list[Slot]:
    """Other slots from which a program may call the function in a slot.

    These are the slot in a copy of its module that runs as ``__main__`` (``python -m``), and the names by which loaded
    modules imported a function of a module. This package's own modules are left out.
    """
    module, main = sys.modules[slot.seam.module], sys.modules["__main__"]
    found = [slot]
    if main is not module and getattr(module, "__file__", None) == getattr(main, "__file__", ""):
        with contextlib.suppress(SeamMovedError):  # the copy has not been executed to this line yet
            found += (each for each in (_walk(slot.seam, main),) if each.raw() is not _ABSENT)
    named = [each.raw() for each in found if isinstance(each.owner, ModuleType) and _is_at_home(each)]
    for other in list(sys.modules.values()) if named else ():
        if isinstance(other, ModuleType) and other.__name__.partition(".")[0] != __name__.partition(".")[0]:
            names = [name for name, value in list(vars(other).items()) if any(value is each for each in named)]
            found += (Slot(slot.seam, other, name) for name in names)
    distinct = {(id(each.owner), each.name): each for each in found}
    del distinct[id(slot.owner), slot.name]
    return list(distinct.values())


def _is_at_home(slot: Slot) -> bool:
    """Whether the function of a module's slot was defined there. A slot that was imported by name is meant alone."""
    return getattr(function_in(slot.raw()), "__module__", None) in (slot.seam.module, "__main__")


@functools.cache
def recorded(release: str) -> Mapping[str, Sequence[str]]:
    """The fingerprints of a release that was read, by path.

    A function of vLLM or vLLM-Omni has one. A function of a library has one for each version that was read.
    """
    files = (FINGERPRINTS / "libraries.json", FINGERPRINTS / f"{release}.json")
    return {path: found for file in files for path, found in json.loads(file.read_text(encoding="utf-8")).items()}


def verify(seam: AnySeam, release: str) -> Slot:
    """Check that a seam is as on a release that was read.

    Raises:
        SeamMovedError: It differs. The message says what was found and what was expected.
    """
    slot = find(seam)
    raw, expected = slot.raw(), recorded(release).get(seam.path, ["not read there"])
    difference = ""
    if isinstance(seam, Add):
        difference = f"{slot.owner!r} already has it" if hasattr(slot.owner, slot.name) else ""
    elif raw is _ABSENT:
        difference = f"{slot.owner!r} itself has no {slot.name!r}"
    elif isinstance(seam, (Replace, Relies)) and not _is_plain_or_ours(raw):
        who = package(theirs(raw))
        difference = f"{who} wraps it, and the patch would bypass that; switch off this patch, or {who}'s wrapper"
    elif (found := as_read(seam, raw)) not in expected:
        difference = f"it has changed: found {found}, expected {' or '.join(expected)}"
    if difference:
        raise SeamMovedError(f"{seam.path}: {difference}")
    return slot


def as_read(seam: AnySeam, raw: Any) -> str:
    """What ``fingerprints/`` records of the object in a slot: the fingerprint of its source.

    Of a library's function that is only wrapped it is the parameters, because any version of the library may be
    installed.
    """
    it = function_in(raw)
    if isinstance(seam, Wrap) and seam.module.partition(".")[0] not in UPSTREAM:
        return f"({', '.join(inspect.signature(it).parameters)})"
    return fingerprint(it)


def function_in(raw: Any) -> Any:
    """Upstream's own function, inside all wrappers in the slot."""
    return inspect.unwrap(raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw)


def fits(raw: Any) -> Callable[[Any, Any, Any], bool]:
    """Whether upstream's function in a slot takes an instance and arguments.

    A function with the same parameters and no body is called, because binding a signature takes fifteen times as long.
    """
    parameters = inspect.signature(function_in(raw)).parameters.values()
    bare = [
        each.replace(annotation=each.empty, default=each.default if each.default is each.empty else None)
        for each in parameters
    ]
    takes = eval(f"lambda {str(inspect.Signature(bare))[1:-1]}: None")  # noqa: S307 - names of parameters

    def check(instance: Any, args: Any, kwargs: Any) -> bool:
        try:
            takes(*(() if instance is None else (instance,)), *args, **kwargs)
        except TypeError:
            return False
        return True

    return check


def _is_plain_or_ours(raw: Any) -> bool:
    """Whether all wrappers around upstream's function are this package's. A class has none."""
    raw = theirs(raw)
    # isinstance would report the wrapped function's type for another package's wrapt wrapper.
    raw = raw.__func__ if type(raw) in (classmethod, staticmethod) else raw
    return isinstance(raw, type) or (type(raw) is FunctionType and not hasattr(raw, "__wrapped__"))


def theirs(raw: Any, ours: Any = None) -> Any:
    """The outermost object of a slot that is not this package's wrapper. None if ``ours`` is inside nothing else."""
    while raw is not ours and is_ours(raw):
        raw = raw.__wrapped__
    return None if raw is ours else raw


def package(raw: Any) -> str:
    """The module that made a wrapper. Its own ``__module__`` is usually that of what it wraps."""
    raw = getattr(raw, "__func__", raw)
    of_wrapt = getattr(getattr(raw, "_self_wrapper", None), "__module__", None)
    return str(of_wrapt or getattr(raw, "__globals__", {}).get("__name__") or type(raw).__module__)


def is_inside(ours: Any, raw: Any, deep: int = 6) -> bool:
    """Whether an object calls ``ours``, as far as its wrappers and closures show."""
    raw = getattr(raw, "__func__", raw)
    cells = getattr(raw, "__closure__", None) or ()
    inner = [getattr(raw, "__wrapped__", None), *(cell.cell_contents for cell in cells if cell != CellType())]
    return raw is ours or (deep > 0 and any(is_inside(ours, each, deep - 1) for each in inner))


def is_ours(raw: Any) -> bool:
    """Whether this object itself is a wrapper of this package."""
    try:
        # hasattr would look into the wrapped function of another package's wrapt wrapper.
        object.__getattribute__(raw, MARK)
    except AttributeError:
        return False
    return True


# ---- Fingerprints ----

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def fingerprint(it: Any) -> str:
    """A short hash of a function's source, decorators included, or of the attributes that a class declares.

    Comments, docstrings and layout do not change it. It is the same on every supported Python, because it is made from
    the syntax tree without empty fields. Python releases differ in which of those a tree has. A class counts with its
    bases in upstream, by fields, properties, class attributes and what methods assign to ``self``.

    Raises:
        SeamMovedError: The source cannot be read.
    """
    try:
        meaning = _attributes(it) if isinstance(it, type) else _meaning(_parsed(it))
    except (OSError, TypeError, SyntaxError) as error:
        raise SeamMovedError(f"{it!r}: its source cannot be read ({error})") from error
    return hashlib.sha256(ascii(meaning).encode()).hexdigest()[:16]


def _parsed(it: Any) -> ast.Module:
    source = inspect.getsource(it)
    return ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)  # a method is indented


def _attributes(owner: type) -> list[str]:
    found: set[str] = set()
    for each in owner.__mro__:
        if each is owner or each.__module__.partition(".")[0] in UPSTREAM:
            nodes = list(ast.walk(_parsed(each)))
            body = next(node.body for node in nodes if isinstance(node, ast.ClassDef))
            found.update(name for node in body for name in _declared(node))
            stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
            found.update(node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")
    return sorted(found)


def _declared(node: ast.stmt) -> list[str]:
    """The attributes that a statement of a class declares. Plain methods are none."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name] if node.decorator_list else []
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return []
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return [each.id for each in names]


def _meaning(node: Any) -> Any:
    """A syntax tree as lists, without docstrings and empty fields."""
    if isinstance(node, list):
        return [_meaning(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    return [type(node).__name__, *((name, _meaning(value)) for name, value in fields.items())]
