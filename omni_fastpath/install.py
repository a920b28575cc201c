"""Two-phase install of patches: verify every seam, then write, check, and set the state last; exact undo.

A patch that is installed stays installed, with its values, until the process ends: engines that run use it. Only a
refused start takes off what it has installed itself. The functions here raise only what they document; what went wrong
with a patch is in the ledger as its state.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from omni_fastpath.config import Resolved
from omni_fastpath.declare import Add, AnySeam, Fit, Options, Patch, Process, Replace, Row, State, Wrap
from omni_fastpath.ledger import LEDGER, logger, warn_once
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from omni_fastpath.seams import MARK, SeamMovedError, Slot, verify

_UPSTREAM = frozenset({"vllm", "vllm_omni"})


class RefusedError(RuntimeError):
    """``on_unsupported: fail`` and a patch that was asked for cannot serve; the message names it and why."""


@dataclass
class _Installation:
    """One patch's: each slot that was written with what stood there and what was written, and what to call at last."""

    written: list[tuple[Slot, Any, Any]] = field(default_factory=list)
    taken_off: Callable[[], None] | None = None


_lock = threading.RLock()
_installed: dict[str, _Installation] = {}


# ---- What a patch is on the installed release ----


def row_here(patch: Patch) -> Row | None:
    """What the patch is on the installed vLLM-Omni; None when it was not tested there."""
    found = vllm_omni_release()
    return None if found is None else patch.row_on(found.version)


def state_here(patch: Patch) -> State:
    """The state that its rows promise on the installed vLLM-Omni."""
    row = row_here(patch)
    return State.UNSUPPORTED if row is None else row.state


def release_problem(patch: Patch) -> str | None:
    """Why the patch has no row on the installed vLLM-Omni; None when it has one."""
    if row_here(patch) is not None:
        return None
    tested = ", ".join(patch.releases)
    found = vllm_omni_release()
    if found is None:
        return f"vllm-omni is not installed; tested: {tested}"
    return f"{found} is not among the tested releases: {tested}"


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
    seams = seams_here(patch)
    problems = [_problem(f"{seam.path}: looking at it failed", functools.partial(verify, seam)) for seam in seams]
    if seams and not any(problems):
        problems = [_problem("its wrappers cannot be imported", functools.partial(import_wrappers, patch))]
    return [problem for problem in problems if problem is not None]


def _problem(what: str, look: Callable[[], object]) -> str | None:
    """What a look at upstream raised, in words; None when it raised nothing."""
    try:
        look()
    except SeamMovedError as error:
        return str(error)
    except Exception as error:  # upstream's module may raise anything while it is imported
        return f"{what}: {error!r}"
    return None


def import_wrappers(patch: Patch) -> ModuleType:
    """The module with the functions that the patch's seams name.

    Raises:
        SeamMovedError: A module of upstream's is gone, or a name in it, that the patch imports and has no seam in.
    """
    LEDGER.entry(patch)  # the module looks up its runtime while it is imported
    try:
        return importlib.import_module(patch.wrappers)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _UPSTREAM:
            raise
        raise SeamMovedError(f"{error.name}: what the patch imports from it cannot be had ({error})") from error


# ---- A configuration takes effect ----


def apply(resolved: Resolved, process: Process, patches: Sequence[Patch] = PATCHES) -> None:
    """Install the patches that are on and are not installed yet.

    An installed patch stays as it is; where ``resolved`` says otherwise, a warning says so.

    Raises:
        RefusedError: A patch that was asked for is unsupported or failed, and ``on_unsupported`` is ``fail``. What this
            call has installed is taken off again, as it is after any other exception.
    """
    with _lock:
        before = set(_installed)
        try:
            for patch in patches:
                _apply_one(resolved, patch, process)
            if resolved.on_unsupported == "fail":
                _refuse_trouble(resolved, process, patches)
        except BaseException:
            for patch in reversed(patches):
                if patch.name not in before:
                    uninstall(patch)
            raise


def _apply_one(resolved: Resolved, patch: Patch, process: Process) -> None:
    entry, options = LEDGER.entry(patch), resolved.enabled.get(patch.name)
    if is_installed(patch.name):
        _warn_of_difference(patch, entry.options, options)
        return
    entry.options, entry.origin = options or patch.options(), resolved.origins.get(patch.name, "")
    if options is None:
        LEDGER.set(patch, State.OFF, resolved.off.get(patch.name, "not asked for"))
    elif process not in patch.processes:
        where = " or ".join(sorted(each.value for each in patch.processes))
        LEDGER.set(patch, State.NOT_APPLICABLE, f"its slots are used in the {where} process; this is a {process.value}")
    elif (lacking := _lacking(patch)) is not None:
        required = LEDGER.named(lacking)
        LEDGER.set(patch, required.state, f"requires {lacking}, which is {required.state.value}: {required.reason}")
    else:
        install(patch, process)


def _warn_of_difference(patch: Patch, here: Options | None, asked: Options | None) -> None:
    if asked is None:
        warn_once(f"{patch.name} stays on: an installed patch stays until the process ends")
    elif asked != here:
        warn_once(f"{patch.name} keeps its values {here!r} until the process ends; asked for now: {asked!r}")


def _lacking(patch: Patch) -> str | None:
    """A patch that this one requires and that does not serve; None too where this one has nothing to do."""
    if not isinstance(row_here(patch), Fit):
        return None
    return next((name for name in patch.requires if not LEDGER.named(name).state.satisfies_requirement), None)


def _refuse_trouble(resolved: Resolved, process: Process, patches: Sequence[Patch]) -> None:
    trouble: list[str] = []
    for patch in patches:
        entry = LEDGER.entry(patch)
        if patch.name not in resolved.enabled:
            continue
        if entry.state.is_trouble:
            trouble.append(f"{patch.name} is {entry.state.value}: {entry.reason}")
        elif problems := _problems_in_stages(patch, process):
            trouble.append(f"{patch.name} is {State.UNSUPPORTED.value}: in the stages: {'; '.join(problems)}")
    if trouble:
        raise RefusedError(f"omni-fastpath: fastpath.on_unsupported is 'fail' and {'; '.join(trouble)}")


def _problems_in_stages(patch: Patch, process: Process) -> list[str]:
    """A stage can no longer refuse the server's start: what would be found there is looked for here."""
    row = row_here(patch)
    is_all_here = process in patch.processes and not (isinstance(row, Fit) and row.of_stages)
    if process is Process.STAGE or Process.STAGE not in patch.processes or is_all_here:
        return []
    return verify_patch(patch)


# ---- One patch ----


def is_installed(name: str) -> bool:
    """Whether the patch was installed in this process and not taken off."""
    return name in _installed


def install(patch: Patch, process: Process | None = None) -> State:
    """Install one patch and return its state; never raises for a reason of the patch or of upstream.

    Args:
        patch: Its declaration.
        process: The kind of process whose slots are written; all slots for None.
    """
    with _lock:
        if is_installed(patch.name):
            return LEDGER.entry(patch).state
        row = row_here(patch)
        if row is None:
            return LEDGER.set(patch, State.UNSUPPORTED, str(release_problem(patch)))
        if not isinstance(row, Fit):
            return LEDGER.set(patch, row.state, row.remarks)
        try:
            slots = [verify(seam) for seam in row.seams_in(process)]
            wrappers = import_wrappers(patch)
        except SeamMovedError as error:
            return LEDGER.set(patch, State.UNSUPPORTED, f"a seam moved: {error}")
        except Exception as error:
            logger.exception("omni-fastpath: verifying %s failed", patch.name)
            return LEDGER.set(patch, State.FAILED, f"verifying it failed: {error!r}")
        return _install_verified(patch, row, slots, wrappers)


def _install_verified(patch: Patch, row: Fit, slots: Sequence[Slot], wrappers: ModuleType) -> State:
    installation = _Installation()
    try:
        installation.taken_off = _named(wrappers, patch.taken_off)
        figures = _named(wrappers, patch.figures)
        for slot in slots:
            match slot.seam:
                case Wrap(wrapper=name) | Replace(wrapper=name):
                    _write(installation.written, slot, _around(slot, _named(wrappers, name), patch))
                case Add(function=name):
                    _write(installation.written, slot, _named(wrappers, name))
    except Exception as error:
        logger.exception("omni-fastpath: installing %s failed; putting everything back", patch.name)
        _put_back(installation)
        return LEDGER.set(patch, State.FAILED, f"installing it failed, everything was put back: {error!r}")
    _installed[patch.name] = installation
    entry = LEDGER.entry(patch)
    left_out = row.without_api_server if len(slots) < len(row.seams) else ""
    entry.remarks, entry.figures = "; ".join(filter(None, (row.remarks, left_out))), figures
    entry.taken_off = installation.taken_off
    return LEDGER.set(patch, State.APPLIED, "")


def _named(wrappers: ModuleType, name: str | None) -> Any:
    """The function that the declaration names in the wrappers module; None where it names none."""
    return None if name is None else getattr(wrappers, name)


def uninstall(patch: Patch) -> None:
    """Take one patch off: every slot gets back the raw object that it had, last written first.

    Refused, with a line in the log, where another package wrote one of its slots after us: then all slots stay.
    """
    with _lock:
        installation = _installed.get(patch.name)
        if installation is None:
            return
        for slot, _, ours in installation.written:
            if not slot.holds(ours):
                path, found = slot.seam.path, slot.raw()
                logger.error("omni-fastpath: %s stays: %s was written after us, found %r", patch.name, path, found)
                return
        _put_back(installation)
        del _installed[patch.name]
        entry = LEDGER.entry(patch)
        entry.figures = entry.taken_off = None
        LEDGER.set(patch, State.OFF, "taken off")


def _put_back(installation: _Installation) -> None:
    for slot, raw, _ in reversed(installation.written):
        slot.write(raw)
    if installation.taken_off is not None:
        installation.taken_off()


def _write(written: list[tuple[Slot, Any, Any]], slot: Slot, ours: Any) -> None:
    raw = slot.raw()
    slot.write(ours)
    if not slot.holds(ours):
        slot.write(raw)
        raise RuntimeError(f"{slot.seam.path} does not hold what was just written into it")
    written.append((slot, raw, ours))


def _around(slot: Slot, wrapper: Callable[..., Any], patch: Patch) -> Any:
    """A wrapt wrapper around a raw slot, marked as the patch's; an exception of ours ends nothing in it."""
    from wrapt import FunctionWrapper  # noqa: PLC0415 - imported on install only

    ours = FunctionWrapper(slot.raw(), LEDGER.entry(patch).guarded(wrapper, f"the wrapper of {slot.seam.qualname}"))
    setattr(ours, MARK, patch.name)
    return ours
