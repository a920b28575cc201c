"""Install and uninstall patches, one after the other.

For each patch all seams are verified, then its slots are written and checked, and last its state is set. Uninstalling
restores exactly what was there.

On a listed release a patch uses its row for that release. Another release may be the same code under another name.
There a patch uses a row if every function of vLLM and vLLM-Omni that the row names has the same body as on one of the
row's releases (``on_unlisted``).

An installed patch stays installed, with its values, until the process ends, because running engines use it. Only a
refused start uninstalls the patches that it has installed itself. The functions here raise only the exceptions that
they document. An error of a patch becomes its state in the ledger.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from packaging.version import Version

from omni_fastpath import seams
from omni_fastpath.config import Resolved
from omni_fastpath.declare import Add, AnySeam, Fit, Patch, Process, Row, State, Wrap
from omni_fastpath.guard import guard_wrapper
from omni_fastpath.ledger import LEDGER, PatchState, logger, warn_once
from omni_fastpath.process_role import RefusedError, is_serve
from omni_fastpath.releases import vllm_omni_release
from omni_fastpath.seams import MARK, UPSTREAM, SeamMovedError, Slot, verify

_Written = tuple[Slot, Any, Any]
"""A slot, what was in it, and what was written into it."""

_lock = threading.RLock()
_installed: dict[str, list[_Written]] = {}
_left: dict[str, list[tuple[Slot, Any]]] = {}
"""What an installed patch left in each slot that it has written, or whose function it relies on."""


# ---- The row of a patch on the installed release ----


class Found(NamedTuple):
    """The row that a patch uses, with its verified slots.

    Attributes:
        row: The row.
        slots: The slots of its seams.
        release: The listed release, which is the installed one or has the same code.
        same_as: The same if the installed one is not listed. Else empty.
    """

    row: Row
    slots: list[Slot]
    release: str
    same_as: str

    @property
    def words(self) -> str:
        """For the reason of a state: whether it is a preview (a release candidate), the note, and whose code it is."""
        preview = "preview" if Version(self.release).is_prerelease else ""
        same = f"{vllm_omni_release()}: every function is as in {self.same_as}" if self.same_as else ""
        return "; ".join(filter(None, (preview, self.row.note, same)))


def find_row(patch: Patch, process: Process | None, on_unlisted: str | None) -> Found:
    """The row that the patch uses in a kind of process.

    Raises:
        SeamMovedError: There is none, or a seam moved. The message is the complete reason.
    """
    if (listed := _listed_here(patch)) is not None:
        release, row = listed
        seams = seams_in(row, process) if isinstance(row, Fit) else ()
        return Found(row, [verify(seam, release) for seam in seams], release, same_as="")
    found, moved = vllm_omni_release(), ""
    for release, row in patch.candidates(found.version, on_unlisted) if found else ():
        try:
            return Found(row, [verify(seam, release) for seam in seams_in(row, process)], release, same_as=release)
        except SeamMovedError as error:
            moved = moved or f"; unlike {release}: {error}"  # only the nearest release is named
    raise SeamMovedError(f"{unlisted(patch)}{moved}")


def seams_in(row: Row, process: Process | None) -> tuple[AnySeam, ...]:
    """The seams that a kind of process verifies before it writes any. None means all processes."""
    if process is None or not isinstance(row, Fit):
        return row.seams
    has_api_server = is_serve(sys.argv) or all(module in sys.modules for module in row.of_api_server)
    left_out = () if process is not Process.SERVER or has_api_server else row.of_api_server
    return tuple(seam for seam in row.seams if seam.module not in left_out)


def row_here(patch: Patch) -> Row | None:
    """The patch's row for the installed vLLM-Omni. None if that release is not listed."""
    listed = _listed_here(patch)
    return listed and listed[1]


def _listed_here(patch: Patch) -> tuple[str, Row] | None:
    """The installed vLLM-Omni as the patch's row spells it, and the row. None if no row lists it."""
    found = vllm_omni_release()
    return patch.listed(found and found.version)


def state_here(patch: Patch) -> State:
    """The patch's declared state on the installed vLLM-Omni."""
    row = row_here(patch)
    return State.UNSUPPORTED if row is None else row.state


def release_problem(patch: Patch, on_unlisted: str | None = None) -> str | None:
    """Why no row can serve the installed vLLM-Omni. None if a row lists it, or may have the same code."""
    found = vllm_omni_release()
    may_serve = found is not None and (row_here(patch) is not None or patch.candidates(found.version, on_unlisted))
    return None if may_serve else unlisted(patch)


def unlisted(patch: Patch) -> str:
    """A message that the installed release is not listed."""
    tested = ", ".join(patch.releases)
    found = vllm_omni_release()
    if found is None:
        return f"vllm-omni is not installed; tested: {tested}"
    return f"{found} is not among the tested releases: {tested}"


def verify_patch(patch: Patch, on_unlisted: str | None = None) -> list[str]:
    """How the installed vLLM-Omni first differs from the declaration. Empty if it does not.

    This imports the modules that the patch's seams name and, if all seams match, the patch's wrappers.
    """
    try:
        _verified(patch, None, on_unlisted)
    except SeamMovedError as error:
        return [str(error)]
    except Exception as error:  # importing an upstream module may raise anything
        return [f"it cannot be verified: {error!r}"]
    return []


def _verified(patch: Patch, process: Process | None, on_unlisted: str | None) -> tuple[Found, ModuleType | None]:
    """The row, and the wrappers if it is a ``Fit``. Raises the exceptions of ``find_row`` and ``import_wrappers``."""
    found = find_row(patch, process, on_unlisted)
    return found, import_wrappers(patch) if isinstance(found.row, Fit) else None


def import_wrappers(patch: Patch) -> ModuleType:
    """The module with the functions that the patch's seams name.

    Raises:
        SeamMovedError: The module imports an upstream module or name that does not exist and is not a seam.
    """
    LEDGER.entry(patch)  # the module needs the entry while it is imported
    try:
        return importlib.import_module(patch.wrappers)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in UPSTREAM:
            raise
        raise SeamMovedError(f"{error.name}: what the patch imports from it is missing ({error})") from error


# ---- A configuration ----


def apply(resolved: Resolved, process: Process, patches: Sequence[Patch]) -> None:
    """Install the enabled patches that are not installed yet, and log the result.

    An installed patch does not change. If ``resolved`` differs from it, a warning is logged.

    Args:
        resolved: The configuration.
        process: The kind of this process.
        patches: The declarations.

    Raises:
        RefusedError: An enabled patch is unsupported or failed, and ``on_unsupported`` is ``fail``. The patches that
            this call has installed are uninstalled, as after any other exception.
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
        for line in _outcome(patches):
            logger.info("omni-fastpath: %s", line)


def _outcome(patches: Sequence[Patch]) -> Iterator[str]:
    """A line for each state that is neither off nor a problem. Problems were logged separately."""
    for state in (State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE):
        by_reason: dict[str, list[str]] = {}
        for entry in map(LEDGER.entry, patches):
            if entry.state is state:
                by_reason.setdefault(f" ({entry.reason})" if entry.reason else "", []).append(entry.patch.name)
        if by_reason:
            yield f"{state.value}: {'; '.join(', '.join(names) + reason for reason, names in by_reason.items())}"


def _apply_one(resolved: Resolved, patch: Patch, process: Process) -> None:
    entry, options = LEDGER.entry(patch), resolved.enabled.get(patch.name)
    if is_installed(patch.name):
        if options is None:
            warn_once(f"{patch.name} stays on, because an installed patch stays until the process ends")
        elif options != entry.options:
            kept = f"keeps its values {entry.options!r} until the process ends"
            warn_once(f"{patch.name} {kept}; requested now: {options!r}")
        return
    entry.options = options or patch.options()
    if options is None:
        LEDGER.set(patch, State.OFF, resolved.off.get(patch.name, "not asked for"))
    elif process not in patch.processes:
        used = f"it is used in a {' or '.join(sorted(each.value for each in patch.processes))} process"
        LEDGER.set(patch, State.NOT_APPLICABLE, f"{used}, and this is a {process.value} process")
    else:
        for required in map(LEDGER.named, patch.requires):
            if process in required.patch.processes and not required.state.satisfies_requirement:
                name, state = required.patch.name, required.state
                LEDGER.set(patch, state, f"requires {name}, which is {state.value}: {required.reason}")
                return
        install(patch, process, resolved.on_unlisted)


def _refuse_trouble(resolved: Resolved, process: Process, patches: Sequence[Patch]) -> None:
    trouble: list[str] = []
    for patch in patches:
        entry = LEDGER.entry(patch)
        if patch.name not in resolved.enabled:
            continue
        if entry.state.is_trouble:
            trouble.append(f"{patch.name} is {entry.state.value}: {entry.reason}")
        elif process not in patch.processes and Process.STAGE in patch.processes:
            # A stage would find it too, but cannot refuse the start.
            moved = verify_patch(patch, resolved.on_unlisted)
            trouble += [f"{patch.name} is {State.UNSUPPORTED.value}: in the stages: {each}" for each in moved]
    if trouble:
        raise RefusedError(f"fastpath.on_unsupported is 'fail' and {'; '.join(trouble)}")


# ---- One patch ----


def is_installed(name: str) -> bool:
    """Whether the patch is installed in this process."""
    return name in _installed


def install(patch: Patch, process: Process | None = None, on_unlisted: str | None = None) -> State:
    """Install one patch and return its state. Errors of the patch and of upstream modules become states.

    Args:
        patch: Its declaration.
        process: The kind of process whose seams are used. None means all seams.
        on_unlisted: Which unlisted releases may be served (``Patch.candidates``).
    """
    with _lock:
        if is_installed(patch.name):
            return LEDGER.entry(patch).state
        try:
            found, wrappers = _verified(patch, process, on_unlisted)
        except SeamMovedError as error:
            moved = "" if row_here(patch) is None else "a seam has changed: "
            return LEDGER.set(patch, State.UNSUPPORTED, f"{moved}{error}")
        except Exception as error:
            logger.exception("omni-fastpath: verifying %s failed", patch.name)
            return LEDGER.set(patch, State.FAILED, f"verifying it failed: {error!r}")
        LEDGER.entry(patch).same_as = found.same_as
        if wrappers is None:
            return LEDGER.set(patch, found.row.state, found.words)
        return _install_verified(patch, found, wrappers)


def _install_verified(patch: Patch, found: Found, wrappers: ModuleType) -> State:
    entry, row = LEDGER.entry(patch), found.row
    written: list[_Written] = []
    try:
        entry.step_aside = getattr(wrappers, "step_aside", None)
        for slot in found.slots:
            match slot.seam:
                case Wrap(wrapper=name):
                    slots = (slot, *seams.elsewhere(slot))
                    ours = {id(each.raw()): _around(each, getattr(wrappers, name), patch) for each in reversed(slots)}
                    for each in slots:
                        _write(written, each, ours[id(each.raw())])
                case Add(function=name):
                    _write(written, slot, getattr(wrappers, name))
    except Exception as error:
        logger.exception("omni-fastpath: installing %s failed, and everything is put back", patch.name)
        _put_back(entry, written)
        return LEDGER.set(patch, State.FAILED, f"installing it failed, everything was put back: {error!r}")
    _installed[patch.name] = written
    _left[patch.name] = [(slot, slot.raw()) for slot in found.slots if not isinstance(slot.raw(), type)]
    left_out = row.without_api_server if isinstance(row, Fit) and len(found.slots) < len(row.seams) else ""
    entry.remarks, entry.figures = "; ".join(filter(None, (found.words, left_out))), getattr(wrappers, "figures", None)
    return LEDGER.set(patch, State.APPLIED, "")


def uninstall(patch: Patch) -> None:
    """Uninstall one patch: restore the raw object of every slot, the last written first.

    If another package has written one of the slots since, nothing is restored, and an error is logged.
    """
    with _lock:
        written = _installed.get(patch.name)
        if written is None:
            return
        for slot, _, ours in written:
            if slot.raw() is not ours:
                why = f"another package has written {slot.seam.path} since, found {slot.raw()!r}"
                logger.error("omni-fastpath: %s stays, because %s", patch.name, why)
                return
        del _installed[patch.name]
        _put_back(LEDGER.entry(patch), written)
        LEDGER.set(patch, State.OFF, "uninstalled")


def look_again() -> None:
    """Report, in the patch's state, that another package has written a slot since it was installed. Raises nothing."""
    with _lock:
        for entry in [LEDGER.named(name) for name in _installed]:
            with contextlib.suppress(Exception):  # of one patch, so that the others are looked at
                _look_at(entry)


def _look_at(entry: PatchState) -> None:
    since = [(slot.seam, seams.theirs(slot.raw(), left), left) for slot, left in _left[entry.patch.name]]
    since = [each for each in since if each[1] is not None]
    told = ", ".join(f"{seams.package(other)} wrapped {seam.path}" for seam, other, _ in since)
    if any(isinstance(seam, (Wrap, Add)) and not seams.is_inside(left, other) for seam, other, left in since):
        entry.fail("keeping its place", RuntimeError(f"since installed, {told}, without the patch inside"))
    elif since and entry.state is State.APPLIED:
        entry.report(State.APPLIED, f"since installed, {told}; it does not see what this patch does itself")


def _put_back(entry: PatchState, written: Sequence[_Written]) -> None:
    for slot, raw, _ in reversed(written):
        slot.write(raw)
    if entry.step_aside is not None:
        entry.step_aside()
    entry.figures, entry.step_aside, entry.same_as = None, None, ""


def _write(written: list[_Written], slot: Slot, ours: Any) -> None:
    raw = slot.raw()
    slot.write(ours)
    if slot.raw() is not ours:
        slot.write(raw)
        raise RuntimeError(f"{slot.seam.path} does not contain what was just written into it")
    written.append((slot, raw, ours))


def _around(slot: Slot, wrapper: Callable[..., Any], patch: Patch) -> Any:
    """A wrapt wrapper around a raw object, marked with the patch's name, and guarded against the patch's errors."""
    from wrapt import FunctionWrapper  # noqa: PLC0415 - imported on install only

    what, raw = f"the wrapper of {slot.seam.qualname}", slot.raw()
    ours = FunctionWrapper(raw, guard_wrapper(LEDGER.entry(patch), wrapper, what, seams.fits(raw)))
    setattr(ours, MARK, patch.name)
    return ours
