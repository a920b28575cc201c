"""Slots of upstream's: finding them, checking that they look as declared, writing them and putting them back.

The raw slot is what stands in the owner's ``__dict__``. ``getattr`` would bind it: a bound classmethod that an undo
writes back makes every subclass's call the owner's, and a function taken out of its ``staticmethod`` gets a ``self``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from omni_fastpath.bodies import SourceError, fingerprint
from omni_fastpath.declare import Function, Pin, Replace, Seam

MARK = "_self_omni_fastpath"
"""Attribute of every wrapper of ours: the name of its patch. wrapt keeps ``_self_`` attributes on the wrapper."""

_ABSENT = object()
"""What stands in a slot that is not there."""

_UPSTREAMS = frozenset({"vllm", "vllm_omni", "torch", "contextlib", "functools"})
"""Where the decorators come from that upstream itself puts on its functions."""


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
        return getattr(self.owner, "__dict__", {}).get(self.name, _ABSENT)

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
        found = getattr(owner, "__dict__", {}).get(parent, _ABSENT)
        if found is _ABSENT:
            raise SeamMovedError(f"{seam.path}: {owner!r} has no {parent!r}")
        owner = found
    return Slot(seam, owner, name)


def verify(seam: Seam) -> Slot:
    """Check that a seam looks as declared: its owner; of a function also raw slot, kind, parameter names, body.

    Raises:
        SeamMovedError: It does not; the message says what was found and what was expected.
    """
    slot = find(seam)
    if isinstance(seam, Function):
        for difference in differences(seam, slot):
            raise SeamMovedError(f"{seam.path}: {difference}")
    return slot


def differences(seam: Function, slot: Slot) -> Iterator[str]:
    """Each way in which what stands in the slot is not as declared."""
    raw = slot.raw()
    if raw is _ABSENT:
        yield f"{slot.owner!r} itself has no {slot.name!r}"
        return
    found = descriptor(raw)
    if found != seam.descriptor:
        yield f"is a {found}, expected a {seam.descriptor}"
        return
    function = function_in(raw)
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != seam.parameters:
        yield f"its parameters are {parameters}, expected {seam.parameters}"
    if isinstance(seam, (Replace, Pin)) and not _is_plain_or_ours(raw):
        yield f"holds somebody else's wrapper {raw!r}, which the patch would go past"
    if seam.fingerprints:
        try:
            body = fingerprint(function)
        except SourceError as error:
            yield str(error)
        else:
            if body not in seam.fingerprints:
                yield f"its body moved: fingerprint {body}, expected {seam.fingerprints}"


def function_in(raw: Any) -> Any:
    """Upstream's own function, below whatever stands in the slot."""
    return inspect.unwrap(raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw)


def descriptor(raw: Any) -> str:
    """The kind of what stands in a slot, as a declaration says it."""
    if isinstance(raw, classmethod):
        return "classmethod"
    if isinstance(raw, staticmethod):
        return "staticmethod"
    # A wrapt wrapper of ours (another patch on the same slot) answers as the function that it wraps.
    return "function" if isinstance(inspect.unwrap(raw), FunctionType) else type(raw).__name__


def _is_plain_or_ours(raw: Any) -> bool:
    """Whether nobody else stands between the slot and upstream's function, in whatever depth."""
    while is_ours(raw):
        raw = raw.__wrapped__
    # By type: isinstance asks a foreign wrapt wrapper, which answers as what it wraps.
    raw = raw.__func__ if type(raw) in (classmethod, staticmethod) else raw
    return type(raw) is FunctionType and not hasattr(raw, "__wrapped__")


def foreign_wrapper(raw: Any) -> str | None:
    """Whose wrapper stands in a slot or below ours, in words; None where all is upstream's own, decorators too."""
    while is_ours(raw):
        raw = raw.__wrapped__
    raw = raw.__func__ if type(raw) in (classmethod, staticmethod) else raw
    if not callable(raw) or (type(raw) is FunctionType and not hasattr(raw, "__wrapped__")):
        return None
    maker = _maker(raw)
    return None if maker.partition(".")[0] in _UPSTREAMS else f"a {type(raw).__name__} of {maker}"


def _maker(wrapper: Any) -> str:
    """The module that a wrapper comes from: not what it says, which is what it wraps, but where its code stands."""
    with contextlib.suppress(AttributeError):  # wrapt keeps what it calls there
        wrapper = object.__getattribute__(wrapper, "_self_wrapper")
    if isinstance(wrapper, MethodType):
        wrapper = wrapper.__func__
    if type(wrapper) is FunctionType:
        return str(wrapper.__globals__.get("__name__", "?"))
    return type(wrapper).__module__


def is_ours(raw: Any) -> bool:
    """Whether this very object is a wrapper of ours."""
    try:
        # Not hasattr: a foreign wrapt wrapper answers that for what it wraps.
        object.__getattribute__(raw, MARK)
    except AttributeError:
        return False
    return True
