"""Two-phase install of patches: verify every seam, then write, check, and set the state last; exact undo.

On any error everything that the patch wrote is put back. The functions here raise only what they document; what went
wrong with a patch stands in the ledger as its state.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from packaging.version import InvalidVersion, Version

from omni_fastpath import engines
from omni_fastpath.config import Resolved
from omni_fastpath.declare import (
    Add,
    AnyRow,
    AnySeam,
    Fit,
    Function,
    NotApplicable,
    Options,
    Patch,
    Process,
    Replace,
    State,
    Superseded,
    Wrap,
)
from omni_fastpath.ledger import LEDGER, logger
from omni_fastpath.releases import vllm_omni_release
from omni_fastpath.seams import MARK, SeamMovedError, Slot, SlotTakenError, find, foreign_wrapper, is_ours, verify

_UPSTREAM = frozenset({"vllm", "vllm_omni"})


class RefusedError(RuntimeError):
    """``on_unsupported: fail`` and a patch that was asked for cannot serve; the message names it and why."""


@dataclass
class _Written:
    slot: Slot
    raw: Any
    ours: Any


@dataclass
class _Installation:
    patch: Patch
    in_use: Callable[[], str | None] | None = None
    taken_off: Callable[[], None] | None = None
    written: list[_Written] = field(default_factory=list)


_lock = threading.RLock()
_installed: dict[str, _Installation] = {}


def release_problem(patch: Patch) -> str | None:
    """Why nothing is known of the patch on the installed vLLM-Omni; None when it has a row there."""
    found = vllm_omni_release()
    known = ", ".join(patch.releases)
    if found is None:
        return f"vllm-omni is not installed; tested: {known}"
    if patch.row_on(found.version) is not None:
        return None
    told = f"vllm-omni {found.version} (by {found.source})"
    try:
        Version(found.version)
    except InvalidVersion:
        return f"{told} is no version that can be compared; tested: {known}"
    return f"{told} is not among the tested releases: {known}"


def row_here(patch: Patch) -> AnyRow | None:
    """What the patch is on the installed vLLM-Omni; None when it was not tested there."""
    return patch.row_on(_installed_release())


def state_here(patch: Patch) -> State:
    """The state that its rows promise on the installed vLLM-Omni."""
    return patch.state_on(_installed_release())


def _installed_release() -> str | None:
    found = vllm_omni_release()
    return None if found is None else found.version


def seams_here(patch: Patch) -> tuple[AnySeam, ...]:
    """The patch's seams on the installed vLLM-Omni; none where it is not installed."""
    row = row_here(patch)
    return row.seams if isinstance(row, Fit) else ()


def verify_patch(patch: Patch) -> list[str]:
    """Every way in which the installed upstream differs from the declaration; empty when it fits.

    Imports the modules that the patch's seams name, and, where all of them fit, the patch's wrappers.
    """
    if problem := release_problem(patch):
        return [problem]
    row, problems = row_here(patch), list[str]()
    if not isinstance(row, Fit):
        return problems
    for seam in row.seams:
        try:
            verify(seam)
        except SeamMovedError as error:
            problems.append(str(error))
        except Exception as error:  # whatever importing upstream's module raises
            problems.append(f"{seam.path}: looking at it failed: {error!r}")
    if not problems:
        try:
            import_wrappers(patch, row)
        except SeamMovedError as error:
            problems.append(str(error))
        except Exception as error:  # of ours, or whatever importing upstream's modules raises
            problems.append(f"its wrappers cannot be imported: {error!r}")
    return problems


def verify_all(patches: Sequence[Patch] | None = None) -> dict[str, list[str]]:
    """``verify_patch`` for every patch, for ``omni-fastpath status --verify``."""
    return {patch.name: verify_patch(patch) for patch in (_patches() if patches is None else patches)}


def foreign_wrappers() -> dict[str, list[str]]:
    """What somebody else has put on the slots that hold ours in this process, or had put there before, in words.

    Read without the lock: it is asked for while the ledger tells of an installation.
    """
    found: dict[str, list[str]] = {}
    for name, installation in list(_installed.items()):
        for written in list(installation.written):
            if (where := _foreign_wrapper_at(written)) is not None:
                found.setdefault(name, []).append(f"{written.slot.seam.path}: {where}")
    return found


def _foreign_wrapper_at(written: _Written) -> str | None:
    raw = written.slot.raw()
    while is_ours(raw) and raw is not written.ours:  # another patch's, on the same slot
        raw = raw.__wrapped__
    if raw is written.raw:
        return None  # it is being taken off
    if raw is not written.ours:
        return f"{foreign_wrapper(raw) or repr(raw)} on top of ours"
    below = foreign_wrapper(written.raw)
    return None if below is None else f"{below} below ours"


def foreign_wrappers_of_imported(patches: Sequence[Patch]) -> dict[str, list[str]]:
    """Of each patch here, the seams that bear a foreign wrapper, in words; of modules that were imported."""
    found: dict[str, list[str]] = {}
    for patch in patches:
        for seam in seams_here(patch):
            if seam.module not in sys.modules or not isinstance(seam, Function):
                continue
            try:
                whose = foreign_wrapper(find(seam).raw())
            except SeamMovedError:
                continue
            if whose is not None:
                found.setdefault(patch.name, []).append(f"{seam.path}: {whose}")
    return found


def is_installed(name: str) -> bool:
    """Whether the patch's slots hold ours in this process."""
    return name in _installed


def apply(resolved: Resolved, process: Process, patches: Sequence[Patch] | None = None) -> None:
    """Make this process what ``resolved`` says: take off what is no longer asked for, install the rest.

    Raises:
        RefusedError: A patch that was asked for is unsupported or failed, and ``on_unsupported`` is ``fail``.
            Everything that was installed has been taken off again.
    """
    known = _patches() if patches is None else patches
    with _lock:
        before = {patch.name: _shown(patch) for patch in known if is_installed(patch.name)}
        for patch in reversed(known):
            if patch.name not in resolved.enabled:
                uninstall(patch)
                if is_installed(patch.name):
                    continue  # somebody wrote on top: it could not be taken off, and its state says so
                LEDGER.entry(patch).origin = resolved.origins.get(patch.name, "")
                cause = resolved.off.get(patch.name, "not asked for")
                LEDGER.set(patch, State.OFF, cause)
                if patch.name in resolved.lacking:  # it was asked for; off alone would only be a line at debug level
                    logger.warning("omni-fastpath: %s stays off: it %s", patch.name, cause)
        for patch in known:
            if patch.name in resolved.enabled:
                _apply_one(patch, resolved.enabled[patch.name], resolved.origins.get(patch.name, ""), process)
                if resolved.on_unsupported == "fail" and process is not Process.STAGE:
                    _verify_for_stages(patch, process)
        if resolved.on_unsupported == "fail":
            _refuse_trouble(known, before)


def _shown(patch: Patch) -> tuple[Options | None, str]:
    entry = LEDGER.entry(patch)
    return entry.options, entry.origin


def _apply_one(patch: Patch, options: Options, origin: str, process: Process) -> None:
    entry = LEDGER.entry(patch)
    entry.options, entry.origin = options, origin
    if is_installed(patch.name):
        if entry.state is State.APPLIED:
            LEDGER.set(patch, State.APPLIED, entry.cause)
        return
    if process not in patch.processes:
        where = " or ".join(sorted(each.value for each in patch.processes))
        LEDGER.set(patch, State.NOT_APPLICABLE, f"its slots are used in the {where} process; this is a {process.value}")
        return
    # Where upstream leaves it nothing to do, what it requires does not matter.
    for name in patch.requires if isinstance(row_here(patch), Fit) else ():
        required = LEDGER.named(name)
        if not is_installed(name) and not required.state.satisfies_requirement:
            LEDGER.set(patch, required.state, f"requires {name}, which is {required.state.value}: {required.reason}")
            return
    install(patch, process)


def _verify_for_stages(patch: Patch, process: Process) -> None:
    """A stage can no longer refuse the server's start: look at its seams here, before it is spawned."""
    row = row_here(patch)
    has_others = isinstance(row, Fit) and bool(row.of_stages)
    if Process.STAGE not in patch.processes or (process in patch.processes and not has_others):
        return
    problems = verify_patch(patch)
    if problems:
        LEDGER.set(patch, State.UNSUPPORTED, f"in the stages: {'; '.join(problems)}")


def _refuse_trouble(patches: Sequence[Patch], before: Mapping[str, tuple[Options | None, str]]) -> None:
    trouble = [LEDGER.entry(patch) for patch in patches if LEDGER.entry(patch).state.is_trouble]
    if not trouble:
        return
    try:
        refuse(patches, "; ".join(f"{entry.patch.name} is {entry.state.value}: {entry.reason}" for entry in trouble))
    finally:
        for name, (options, origin) in before.items():
            if is_installed(name):  # a running engine's: it goes on with the values that it has
                entry = LEDGER.named(name)
                entry.options, entry.origin = options, origin


def refuse(patches: Sequence[Patch], what: str) -> NoReturn:
    """Refuse a server under ``on_unsupported: fail``: take off whatever no running engine uses.

    Raises:
        RefusedError: Always.
    """
    with _lock:
        for patch in reversed(patches):
            if is_installed(patch.name) and _user(_installed[patch.name]) is None:
                uninstall(patch)
    raise RefusedError(f"omni-fastpath: fastpath.on_unsupported is 'fail' and {what}")


def install(patch: Patch, process: Process | None = None) -> State:
    """Install one patch and return its state; never raises for a reason of the patch or of upstream.

    Args:
        patch: Its declaration.
        process: The kind of process whose slots are written; of None, all.
    """
    with _lock:
        if is_installed(patch.name):
            return LEDGER.entry(patch).state
        match row_here(patch):
            case None:
                return _set(patch, State.UNSUPPORTED, str(release_problem(patch)))
            case Superseded() | NotApplicable() as row:
                return _set(patch, row.state, row.remarks)
            case Fit() as row:
                return _install_fit(patch, row, process)


def _install_fit(patch: Patch, row: Fit, process: Process | None) -> State:
    try:
        slots = [verify(seam) for seam in row.seams_in(process)]
    except SeamMovedError as error:
        return _set(patch, State.UNSUPPORTED, f"a seam moved: {error}")
    except Exception as error:
        logger.exception("omni-fastpath: verifying %s failed", patch.name)
        return _set(patch, State.FAILED, f"verifying it failed: {error!r}")
    return _install_verified(patch, row, slots)


def _install_verified(patch: Patch, row: Fit, slots: list[Slot]) -> State:
    installation = _Installation(patch)
    try:
        wrappers = import_wrappers(patch, row)
        installation.in_use, installation.taken_off = _named(wrappers, patch.in_use), _named(wrappers, patch.taken_off)
        for slot in slots:
            if isinstance(slot.seam, Add) and hasattr(slot.owner, slot.name):
                return _judge_upstreams_own(patch, slot, _named(wrappers, slot.seam.probe))
        for slot in slots:
            match slot.seam:
                case Wrap(wrapper=name) | Replace(wrapper=name):
                    _write(installation.written, slot, _around(slot.raw(), _named(wrappers, name), patch))
                case Add(function=name):
                    _write(installation.written, slot, _named(wrappers, name))
    except SeamMovedError as error:  # what the wrappers import, before anything was written
        return _set(patch, State.UNSUPPORTED, f"a seam moved: {error}")
    except Exception as error:
        logger.exception("omni-fastpath: installing %s failed; putting everything back", patch.name)
        _put_back(installation)
        return _set(patch, State.FAILED, f"installing it failed, everything was put back: {error!r}")
    _installed[patch.name] = installation
    LEDGER.entry(patch).remarks = "; ".join(filter(None, (row.remarks, _below(installation))))
    LEDGER.entry(patch).figures = _named(wrappers, patch.figures)
    return _set(patch, State.APPLIED, _held(installation))


def import_wrappers(patch: Patch, row: Fit) -> ModuleType:
    """The module with what the patch's slots hold.

    Raises:
        SeamMovedError: A module of upstream's is gone, or a name in it, that the patch imports and has no seam in.
    """
    LEDGER.entry(patch)  # they look up their runtime while they are imported
    try:
        return importlib.import_module(patch.wrappers_of(row))
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _UPSTREAM:
            raise
        raise SeamMovedError(f"{error.name}: what the patch imports from it cannot be had ({error})") from error


def _named(wrappers: Any, name: str | None) -> Any:
    """What the declaration names in its wrappers module; None where it names nothing."""
    return None if name is None else getattr(wrappers, name)


def _held(installation: _Installation) -> str:
    count = len(installation.written)
    return f"{count} slot{'s' if count != 1 else ''} hold{'s' if count == 1 else ''} ours"


def _below(installation: _Installation) -> str:
    """What is to be said of somebody else's wrappers, which ours call."""
    paths = [each.slot.seam.path for each in installation.written if foreign_wrapper(each.raw) is not None]
    return f"on somebody else's wrapper of {', '.join(paths)}" if paths else ""


def _judge_upstreams_own(patch: Patch, slot: Slot, probe: Callable[[Any], str | None]) -> State:
    """Upstream has what the patch would add: use it if it does what ours does, and never overwrite it."""
    difference = probe(slot.owner)
    if difference is None:
        return _set(patch, State.SUPERSEDED, f"upstream has {slot.seam.path}, and it behaves as ours would")
    return _set(patch, State.UNSUPPORTED, f"upstream has a {slot.seam.path} of its own that differs: {difference}")


def uninstall(patch: Patch) -> None:
    """Take one patch off: every slot gets back the raw object that it had, last written first.

    Refused, with a line in the log, while the patch is in use (a running engine asked for it, a running orchestrator
    calls it, or an installed patch requires it) and when somebody else wrote one of its slots after us. It then stays
    ``applied``, because it is, and its reason says why.
    """
    with _lock:
        installation = _installed.get(patch.name)
        if installation is None:
            return
        obstacle = _obstacle(installation)
        if obstacle is not None:
            logger.error("omni-fastpath: %s cannot be taken off: %s", patch.name, obstacle)
            entry = LEDGER.entry(patch)
            if entry.state is State.APPLIED:
                LEDGER.set(patch, State.APPLIED, entry.cause, kept_by=obstacle)
            return
        _put_back(installation)
        del _installed[patch.name]
        LEDGER.entry(patch).figures = None
        _set(patch, State.OFF, "taken off")


def _user(installation: _Installation) -> str | None:
    """Who uses the patch now: an engine that asked for it, or whom the patch itself names."""
    found = installation.in_use() if installation.in_use is not None else None
    return engines.user_of(installation.patch.name) if found is None else found


def _obstacle(installation: _Installation) -> str | None:
    if (user := _user(installation)) is not None:
        return user
    for other in _installed.values():
        if installation.patch.name in other.patch.requires:
            return f"{other.patch.name} requires it"
    for written in installation.written:
        if not written.slot.holds(written.ours):
            return f"{written.slot.seam.path} was written by someone else after us: {written.slot.raw()!r}"
    return None


def _put_back(installation: _Installation) -> None:
    for written in reversed(installation.written):
        try:
            written.slot.restore(written.raw, ours=written.ours)
        except SlotTakenError:
            logger.exception("omni-fastpath: %s: a slot could not be put back", installation.patch.name)
    installation.written.clear()
    if installation.taken_off is not None:
        installation.taken_off()


def _write(written: list[_Written], slot: Slot, ours: Any) -> None:
    raw = slot.raw()
    slot.write(ours)
    if not slot.holds(ours):
        slot.restore(raw, ours=slot.raw())
        raise RuntimeError(f"{slot.seam.path} does not hold what was just written into it")
    written.append(_Written(slot, raw, ours))


def _around(raw: Any, wrapper: Callable[..., Any], patch: Patch) -> Any:
    """A wrapt wrapper around a raw slot, marked as the patch's."""
    from wrapt import FunctionWrapper  # noqa: PLC0415 - imported on install only

    ours = FunctionWrapper(raw, wrapper)
    setattr(ours, MARK, patch.name)
    return ours


def _set(patch: Patch, state: State, reason: str) -> State:
    LEDGER.set(patch, state, reason)
    return state


def _patches() -> Sequence[Patch]:
    from omni_fastpath.patches import PATCHES  # noqa: PLC0415 - the machinery is importable without the patches

    return PATCHES


def modules_of(patch: Patch) -> frozenset[str]:
    """The modules whose import makes the patch installable in a server; none where it is not installed."""
    row = row_here(patch)
    return frozenset(seam.module for seam in row.seams_in(Process.SERVER)) if isinstance(row, Fit) else frozenset()
