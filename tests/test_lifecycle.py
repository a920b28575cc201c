"""Every patch that ships, on the real upstream: in any order of import, install and undo.

Each case runs in a process of its own.
"""

from __future__ import annotations
import __future__

import inspect
import linecache
import sys
import textwrap
from typing import Any

import pytest

from omni_fastpath.config import Resolved, resolve
from omni_fastpath.declare import AnySeam, Fit, Function, Patch, Process, Reads, State
from omni_fastpath.install import row_here, state_here
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from tests.fakes.processes import isolated
from tests.fakes.registration import Key, holder, is_ours, raw, take_off, written

pytestmark = pytest.mark.upstream

NAMES = [patch.name for patch in PATCHES if isinstance(row_here(patch), Fit)]
BY_NAME = {patch.name: patch for patch in PATCHES}


def all_on() -> Resolved:
    """Every patch on."""
    return resolve([], {patch.env: "1" for patch in PATCHES}, PATCHES)


def apply_in_both(resolved: Resolved) -> None:
    """Install the patches of the server and those of the stages in this process, which no real process does."""
    from omni_fastpath.install import apply

    of_server = [patch for patch in PATCHES if Process.SERVER in patch.processes]
    apply(resolved, Process.SERVER, of_server)
    apply(resolved, Process.STAGE, [patch for patch in PATCHES if patch not in of_server])


def seams_here(patch: Patch) -> tuple[AnySeam, ...]:
    """What `apply_in_both` installs of a patch: of one that is in both, what is the server's (`of_stages`)."""
    row = row_here(patch)
    return row.seams_in(Process.SERVER) if isinstance(row, Fit) else ()


def slots() -> dict[Key, Any]:
    """The raw slots of every seam of every patch, after importing their modules."""
    seams = [seam for patch in PATCHES for seam in seams_here(patch) if not isinstance(seam, Reads)]
    return {(seam.module, seam.qualname): raw((seam.module, seam.qualname)) for seam in seams}


def ours_anywhere() -> set[str]:
    """What in the imported modules of vLLM and vLLM-Omni, and in the classes that they define, holds ours."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"vllm", "vllm_omni"}:
            for attribute, value in list(vars(module).items()):
                found[f"{name}:{attribute}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}:{attribute}.{inner}": slot for inner, slot in vars(value).items()}
    return {key for key, value in found.items() if is_ours(value)}


def assert_holds(own: dict[Key, Any], *names: str) -> None:
    """These patches' slots hold ours, once for each, above upstream's own objects; all others hold those themselves."""
    for key, stock in own.items():
        found = raw(key)
        for _ in [name for name in names if key in written(name)]:
            assert is_ours(found), key
            found = None if stock is None else found.__wrapped__
        assert found is stock, key


@isolated("cold")
def test_order_before_the_import() -> None:
    """An undo before the import touches nothing and imports nothing. An install before it imports the target."""
    from omni_fastpath.install import install, uninstall

    for name in NAMES:
        uninstall(BY_NAME[name])
    assert "vllm_omni" not in sys.modules
    for name in NAMES:
        assert install(BY_NAME[name], Process.SERVER) is State.APPLIED
        own = {key: getattr(found, "__wrapped__", None) if is_ours(found) else found for key, found in slots().items()}
        assert not any(map(is_ours, own.values()))
        assert_holds(own, name)
        uninstall(BY_NAME[name])
        assert_holds(own)


@pytest.mark.every_release
@isolated("warm")
def test_every_function_is_as_it_was_read() -> None:
    """Also where only its name matters on this release, because `same_code` compares every body."""
    from omni_fastpath.seams import verify

    release = vllm_omni_release()
    assert release is not None
    for patch in PATCHES:
        row = row_here(patch)
        assert row is not None
        for seam in row.seams:
            verify(seam, release.version, exact=True)


@pytest.mark.every_release
@isolated("warm")
def test_all_patches_together_and_off_again() -> None:
    """Every patch applied, applied again, and off: identity of every slot, each wrapped once per patch."""
    from omni_fastpath.ledger import LEDGER

    own, on = slots(), all_on()
    assert ours_anywhere() == set()
    for _ in range(2):
        apply_in_both(on)
        assert {e.patch.name: e.state for e in LEDGER} == {name: state_here(BY_NAME[name]) for name in on.enabled}
        assert_holds(own, *on.enabled)
    take_off()
    assert_holds(own)
    assert ours_anywhere() == set()
    # 0.32 does one of them itself, and 0.28 has no use for another.
    assert {entry.state for entry in LEDGER} <= {State.OFF, State.SUPERSEDED, State.NOT_APPLICABLE}


# ---- What moved ----


def one_of_each_kind() -> list[Any]:
    """How it moved, and a seam of each kind that a patch can have, those of the last patches."""
    return [
        pytest.param(how, key, id=f"{how}-{kind}")
        for how in ("gone", "parameters", "body")
        for kind, key in {
            type(seam).__name__: (seam.module, seam.qualname)
            for patch in PATCHES
            for seam in seams_here(patch)
            if isinstance(seam, Function) and (seam.pinned or how != "body")
        }.items()
    ]


def with_another_body(function: Any) -> Any:
    """A function of the same parameters that does something more."""
    changed = f"{textwrap.dedent(inspect.getsource(function)).rstrip()}\n    moved = True\n"
    linecache.cache["<moved>"] = (len(changed), None, changed.splitlines(keepends=True), "<moved>")
    space = dict(function.__globals__)
    annotations = function.__code__.co_flags & __future__.annotations.compiler_flag
    exec(compile(changed, "<moved>", "exec", annotations, dont_inherit=True), space)  # noqa: S102
    return space[function.__name__]


def assert_unsupported(affected: set[str], told: str, own: dict[Key, Any]) -> None:
    """The affected patches and their dependants are unsupported for what is told, with no slot; others are applied."""
    from omni_fastpath.ledger import LEDGER

    for patch in PATCHES:
        entry = LEDGER.entry(patch)
        if affected & {patch.name, *patch.requires}:
            assert entry.state is State.UNSUPPORTED, entry
            assert f"a seam has changed: {told}" in entry.reason, entry.reason
        else:
            assert entry.state is state_here(patch), entry
    assert_holds(own, *(entry.patch.name for entry in LEDGER if entry.state is State.APPLIED))


@pytest.mark.parametrize(("how", "key"), one_of_each_kind())
@isolated("warm")
def test_a_seam_that_moved(how: str, key: Key) -> None:
    """Gone from its own class, with other parameters or, where it matters, another body: unsupported, others go on."""
    slots()
    owner, name = holder(key)
    if how == "gone":
        delattr(owner, name)
    else:
        setattr(owner, name, with_another_body(raw(key)) if how == "body" else lambda self, something_new: None)
    affected = {
        patch.name
        for patch in PATCHES
        for seam in seams_here(patch)
        if (seam.module, seam.qualname) == key and (how != "body" or (isinstance(seam, Function) and seam.pinned))
    }
    own = slots()
    apply_in_both(all_on())
    assert_unsupported(affected, f"{key[0]}:{key[1]}", own)
