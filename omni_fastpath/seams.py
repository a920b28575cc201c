"""Find, verify, write and restore slots: attributes of upstream's modules and classes.

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
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from omni_fastpath.declare import Add, Function, Pin, Reads, Replace, Seam

FUNCTIONS = Path(__file__).parent / "functions"
"""One file per release that was read, written by ``scripts/functions.py``."""

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
    """The functions of a release that was read, by path: ``kind(parameters)``, then fingerprints.

    A function of vLLM or vLLM-Omni has one fingerprint. A function of a library has one for each version that was read.
    """
    files = (FUNCTIONS / "libraries.json", FUNCTIONS / f"{release}.json")
    return {path: found for file in files for path, found in json.loads(file.read_text(encoding="utf-8")).items()}


def verify(seam: Seam, release: str, *, exact: bool = False) -> Slot:
    """Check that a seam is as on a release that was read. The arguments are those of ``differences``.

    Raises:
        SeamMovedError: It differs. The message says what was found and what was expected.
    """
    slot = find(seam)
    for difference in differences(seam, slot, release, exact=exact):
        raise SeamMovedError(f"{seam.path}: {difference}")
    return slot


def differences(seam: Seam, slot: Slot, release: str, *, exact: bool = False) -> Iterator[str]:
    """The differences between the object in the slot and a release that was read.

    Args:
        seam: The seam.
        slot: Its slot.
        release: The release that was read.
        exact: Whether the bodies of all functions of vLLM and vLLM-Omni must match, and not only pinned ones.

    Raises:
        SeamMovedError: As ``fingerprint``.
    """
    raw = slot.raw()
    if isinstance(seam, Add):
        if hasattr(slot.owner, slot.name):
            yield f"{slot.owner!r} already has it"
        return
    if raw is _ABSENT:
        yield f"{slot.owner!r} itself has no {slot.name!r}"
    elif isinstance(seam, Reads):
        if lacking := _lacking(raw, seam.names):
            yield f"the class does not declare {', '.join(lacking)}"
    elif isinstance(seam, Function):
        expected, *bodies = recorded(release).get(seam.path, ("not read there",))
        if (found := shape(raw)) != expected:
            yield f"is {found}, expected {expected}"
            return
        if isinstance(seam, (Replace, Pin)) and not _is_plain_or_ours(raw):
            who = package(theirs(raw))
            yield f"{who} wraps it, and the patch would bypass that; switch off this patch, or {who}'s wrapper"
        matters = seam.pinned or (exact and seam.module.partition(".")[0] in UPSTREAM)
        if matters and (body := fingerprint(function_in(raw))) not in bodies:
            yield f"its body has changed: fingerprint {body}, expected {' or '.join(bodies)}"


def shape(raw: Any) -> str:
    """The kind of an object in a slot and, if it is a function, the names of its parameters.

    A wrapper, for example of another patch on the same slot, counts as the function that it wraps.
    """
    function = function_in(raw)
    if not isinstance(function, FunctionType):
        return type(raw).__name__
    kind = next((each.__name__ for each in (classmethod, staticmethod) if isinstance(raw, each)), "function")
    return f"{kind}({', '.join(inspect.signature(function).parameters)})"


def _lacking(owner: type, names: Sequence[str]) -> list[str]:
    """The names that neither the class nor a base declares, also as a field, and that none of its methods assigns."""
    annotated = itertools.chain.from_iterable(vars(each).get("__annotations__", ()) for each in owner.__mro__)
    left = set(names).difference(dir(owner), annotated)
    for function in (function_in(each) for base in owner.__mro__ for each in vars(base).values()):
        if isinstance(function, FunctionType) and left.intersection(function.__code__.co_names):
            left -= _assigned(function)
    return [name for name in names if name in left]


def _assigned(method: FunctionType) -> set[str]:
    """The attributes of its first argument that a method assigns. None are found if its source cannot be read."""
    try:
        tree = ast.parse(_source(method))
    except (OSError, TypeError, SyntaxError):
        return set()
    of = method.__code__.co_varnames[:1]
    stored = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id in of}


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
    """Whether all wrappers around upstream's function are this package's."""
    raw = theirs(raw)
    # isinstance would report the wrapped function's type for another package's wrapt wrapper.
    raw = raw.__func__ if type(raw) in (classmethod, staticmethod) else raw
    return type(raw) is FunctionType and not hasattr(raw, "__wrapped__")


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
    inner = [getattr(raw, "__wrapped__", None), *(cell.cell_contents for cell in cells)]
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


def fingerprint(function: Any) -> str:
    """A short hash of a function's source, decorators included. Comments, docstrings and layout do not change it.

    It is the same on every supported Python, because it is made from the syntax tree without empty fields. Python
    releases differ in which of those a tree has.

    Raises:
        SeamMovedError: The source cannot be read.
    """
    try:
        tree = ast.parse(_source(function))
    except (OSError, TypeError, SyntaxError) as error:
        raise SeamMovedError(f"{function!r}: its source cannot be read ({error})") from error
    return hashlib.sha256(ascii(_meaning(tree)).encode()).hexdigest()[:16]


def _source(function: Any) -> str:
    source = inspect.getsource(function)
    return f"if True:\n{source}" if source[:1].isspace() else source  # a method is indented


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
