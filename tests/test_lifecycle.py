"""Every patch that ships, on the real upstream: in any order of import, install and undo.

Each case runs in a process of its own.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import itertools
import linecache
import sys
import textwrap
from types import FunctionType
from typing import Any

import pytest

from omni_fastpath.config import Resolved
from omni_fastpath.declare import Add, AnySeam, Fit, Function, Patch, Process, Replace, State, Wrap
from omni_fastpath.install import row_here, state_here
from omni_fastpath.patches import PATCHES
from tests.fakes.processes import isolated

pytestmark = pytest.mark.upstream

NAMES = [patch.name for patch in PATCHES if isinstance(row_here(patch), Fit)]
ALL_ON = {patch.env: "1" for patch in PATCHES}

Key = tuple[str, str]


def apply_in_both(resolved: Resolved) -> None:
    """Install the patches of the server and those of the stages in this process, which no real process does."""
    from omni_fastpath.install import apply

    of_server = [patch for patch in PATCHES if Process.SERVER in patch.processes]
    apply(resolved, Process.SERVER, of_server)
    apply(resolved, Process.STAGE, [patch for patch in PATCHES if patch not in of_server])


def take_off() -> None:
    """Undo every patch, the last one first."""
    from omni_fastpath.install import uninstall

    for patch in reversed(PATCHES):
        uninstall(patch)


def seams_here(patch: Patch) -> tuple[AnySeam, ...]:
    """What `apply_in_both` installs of a patch: of one that is in both, what is the server's (`of_stages`)."""
    row = row_here(patch)
    return row.seams_in(Process.SERVER) if isinstance(row, Fit) else ()


def by_name(name: str) -> Patch:
    """A shipped patch."""
    return next(patch for patch in PATCHES if patch.name == name)


def written(patch: Patch) -> set[Key]:
    """The slots that hold something of ours when the patch is applied."""
    return {(s.module, s.qualname) for s in seams_here(patch) if isinstance(s, (Wrap, Replace, Add))}


def owner_of(key: Key) -> Any:
    """The object whose dictionary has the slot, found without the code under test."""
    owner: Any = sys.modules[key[0]]
    for name in key[1].split(".")[:-1]:
        owner = vars(owner)[name]
    return owner


def raw(key: Key) -> Any:
    """The raw slot; None when it is absent."""
    return vars(owner_of(key)).get(key[1].split(".")[-1])


def upstreams_own() -> dict[Key, Any]:
    """The raw slots of every seam of every patch, after importing their modules."""
    for seam in itertools.chain.from_iterable(seams_here(patch) for patch in PATCHES):
        importlib.import_module(seam.module)
    return {(s.module, s.qualname): raw((s.module, s.qualname)) for patch in PATCHES for s in seams_here(patch)}


def slots() -> dict[Key, Any]:
    """Everything in the imported modules of vLLM and vLLM-Omni, and in the classes that they define."""
    found: dict[Key, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"vllm", "vllm_omni"}:
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(name, f"{attribute}.{inner}"): slot for inner, slot in vars(value).items()}
    return found


def changed(before: dict[Key, Any], after: dict[Key, Any]) -> list[Key]:
    """The slots whose function is another object than before, and those of ours that were not there."""
    kinds = (FunctionType, staticmethod, classmethod, property)
    gone = [key for key, value in before.items() if isinstance(value, kinds) and after.get(key) is not value]
    added = [key for key in after.keys() - before.keys() if not is_upstreams(after[key])]
    return gone + [key for key in added if "omni_fastpath" in str(getattr(after[key], "__module__", ""))]


def is_upstreams(value: Any) -> bool:
    """Whether a raw slot holds what its own module defined, or nothing."""
    return value is None or (type(value).__name__ == "function" and "omni_fastpath" not in value.__code__.co_filename)


def assert_holds(patch: Patch | None, own: dict[Key, Any]) -> None:
    """The patch's slots hold ours, once each, above upstream's own objects; all other slots hold those themselves."""
    ours = written(patch) if patch is not None else set()
    for key, stock in own.items():
        found = raw(key)
        if key not in ours:
            assert found is stock, key
        elif stock is None:
            assert type(found).__name__ == "function", key
            assert "omni_fastpath" in found.__module__, key
        else:
            assert found is not stock, key
            assert type(found).__name__ == "FunctionWrapper", key
            assert type(found).__module__.startswith(("wrapt", "_wrappers", "__wrapt__")), key
            assert found.__wrapped__ is stock, f"{key} is wrapped twice"


def _run(name: str, order: str) -> None:
    from omni_fastpath.install import install, is_installed, uninstall
    from omni_fastpath.ledger import LEDGER

    patch = by_name(name)
    own: dict[Key, Any] = {}
    expected = False
    for step in order.split():
        if step == "import":
            imported = upstreams_own()
            own = own or imported
        elif step == "install":
            if not own:
                # The very first install imports the target itself; what was there before is found below ours.
                assert "vllm_omni" not in sys.modules
                install(patch, Process.SERVER)
                own = {key: _below(found) for key, found in upstreams_own().items()}
            assert install(patch, Process.SERVER) is State.APPLIED
            expected = True
        else:
            uninstall(patch)
            expected = False
        assert is_installed(name) == expected
        if own:
            assert all(map(is_upstreams, own.values()))
            assert_holds(patch if expected else None, own)
        else:
            assert "vllm_omni" not in sys.modules, f"{step} imported upstream"
    uninstall(patch)
    assert_holds(None, own)
    assert LEDGER.entry(patch).state is State.OFF


def _below(found: Any) -> Any:
    if type(found).__name__ == "FunctionWrapper":
        return found.__wrapped__
    return None if found is not None and "omni_fastpath" in found.__module__ else found


@pytest.mark.parametrize("name", NAMES)
@isolated("warm")
def test_order_after_the_import(name: str) -> None:
    """With the target imported first: ours while installed, once; upstream's own objects before and after."""
    _run(name, "import install install uninstall uninstall")


@pytest.mark.parametrize("name", NAMES)
@isolated("cold")
def test_order_before_the_import(name: str) -> None:
    """An undo before the import touches nothing and imports nothing; an install before it imports the target itself."""
    _run(name, "uninstall install install uninstall import")


@pytest.mark.every_release
@isolated("warm")
def test_all_patches_together_and_off_again() -> None:
    """The default set applied, applied again, and off: identity of every slot, each wrapped once per patch."""
    from omni_fastpath import config
    from omni_fastpath.ledger import LEDGER

    own, everything = upstreams_own(), slots()
    on = config.resolve([], ALL_ON, PATCHES)
    enabled = [patch for patch in PATCHES if patch.name in on.enabled]
    depth = {key: sum(key in written(patch) for patch in enabled) for key in own}
    for _ in range(2):
        apply_in_both(on)
        assert {e.patch.name: e.state for e in LEDGER} == {each.name: state_here(each) for each in enabled}
        assert not any("somebody else" in entry.reason for entry in LEDGER)  # upstream's own decorators are upstream's
        for key, stock in own.items():
            found, layers = raw(key), 0
            while found is not stock:
                found, layers = (None if stock is None else found.__wrapped__), layers + 1
            assert layers == depth[key], key
    take_off()
    assert_holds(None, own)
    assert changed(everything, slots()) == []
    assert {entry.state for entry in LEDGER} <= {State.OFF, State.SUPERSEDED}  # 0.32 does one of them itself


@isolated("warm")
def test_patch_that_is_off_has_no_slot() -> None:
    """With everything else on, the slots that only this patch writes are upstream's own objects."""
    from omni_fastpath import config
    from omni_fastpath.ledger import LEDGER

    own = upstreams_own()
    for name in NAMES:
        on = config.resolve([], {**ALL_ON, by_name(name).env: "0"}, PATCHES)
        apply_in_both(on)
        assert LEDGER.named(name).state is State.OFF
        others = set().union(*(written(patch) for patch in PATCHES if patch.name in on.enabled))
        for key in written(by_name(name)) - others:
            assert raw(key) is own[key], key
        take_off()


def one_of_each_kind(*, pinned: bool = False) -> list[Any]:
    """A seam of each kind that a patch can have, those of the last patches; with *pinned* of those with a body."""
    found = {
        type(seam).__name__: pytest.param(patch.name, (seam.module, seam.qualname), id=type(seam).__name__)
        for patch in PATCHES
        for seam in seams_here(patch)
        if isinstance(seam, Function) and (seam.fingerprints or not pinned)
    }
    return list(found.values())


def _assert_unsupported(name: str, before: dict[Key, Any], key: Key, *, body: bool = False) -> None:
    """The patch is unsupported for that slot, nothing of it is written, dependants follow, others are applied.

    With ``body`` only those are affected that rely on the slot's body.
    """
    from omni_fastpath import config
    from omni_fastpath.ledger import LEDGER

    apply_in_both(config.resolve([], ALL_ON, PATCHES))
    affected = {
        patch.name
        for patch in PATCHES
        for seam in seams_here(patch)
        if (seam.module, seam.qualname) == key and (not body or (isinstance(seam, Function) and seam.fingerprints))
    }
    for patch in PATCHES:
        entry = LEDGER.entry(patch)
        if patch.name in affected and not set(patch.requires) & affected:
            assert entry.state is State.UNSUPPORTED, entry
            assert entry.reason.startswith(f"a seam moved: {key[0]}:{key[1]}"), entry.reason
        elif patch.name in affected or set(patch.requires) & affected:
            assert entry.state is State.UNSUPPORTED, entry
            assert entry.reason.startswith("requires "), entry.reason
        else:
            assert entry.state is state_here(patch), entry
    assert LEDGER.named(name).state is State.UNSUPPORTED
    applied = [patch for patch in PATCHES if LEDGER.entry(patch).state is State.APPLIED]
    still = set().union(*(written(patch) for patch in applied)) if applied else set()
    for each, held in before.items():
        if each not in still:
            assert raw(each) is held, each


@pytest.mark.parametrize(("name", "key"), one_of_each_kind())
@isolated("warm")
def test_parameters_that_moved(name: str, key: Key) -> None:
    """A function with other parameters in any one slot: the patch is unsupported, nothing is written, others go on."""
    upstreams_own()

    def moved(self: Any, something_new: Any) -> Any:
        pytest.fail("nobody runs it")

    setattr(owner_of(key), key[1].split(".")[-1], moved)
    _assert_unsupported(name, upstreams_own(), key)


@pytest.mark.parametrize(("name", "key"), one_of_each_kind(pinned=True))
@isolated("warm")
def test_body_that_moved(name: str, key: Key) -> None:
    """A function of the same parameters with another body, where the body matters, is a seam that moved."""
    stock = upstreams_own()[key]
    changed = f"{textwrap.dedent(inspect.getsource(stock)).rstrip()}\n    moved = True\n"
    linecache.cache["<moved>"] = (len(changed), None, changed.splitlines(keepends=True), "<moved>")
    space = dict(stock.__globals__)
    annotations = stock.__code__.co_flags & __future__.annotations.compiler_flag
    exec(compile(changed, "<moved>", "exec", annotations, dont_inherit=True), space)  # noqa: S102
    setattr(owner_of(key), key[1].split(".")[-1], space[key[1].split(".")[-1]])
    _assert_unsupported(name, upstreams_own(), key, body=True)


@pytest.mark.parametrize(("name", "key"), one_of_each_kind())
@isolated("warm")
def test_slot_that_is_gone(name: str, key: Key) -> None:
    """Without the slot in its own class or module the patch is unsupported, even when a base class has the name."""
    before = upstreams_own()
    delattr(owner_of(key), key[1].split(".")[-1])
    before[key] = None
    _assert_unsupported(name, before, key)


@isolated("warm")
def test_module_that_is_gone() -> None:
    """Without a module the patches that have a seam in it, or import from it, are unsupported and name it.

    The others are applied.
    """
    from omni_fastpath import config
    from omni_fastpath.ledger import LEDGER

    own = upstreams_own()
    module = "vllm_omni.engine.stage_pool"
    modules: dict[str, Any] = sys.modules
    kept, modules[module] = modules[module], None  # as Python has what cannot be imported
    apply_in_both(config.resolve([], ALL_ON, PATCHES))
    modules[module] = kept
    affected = {patch.name for patch in PATCHES for seam in seams_here(patch) if seam.module == module}
    for patch in PATCHES:
        entry = LEDGER.entry(patch)
        if affected & {patch.name, *patch.requires} or entry.state is not state_here(patch):
            assert entry.state is State.UNSUPPORTED, entry
            assert f"a seam moved: {module}:" in entry.reason, entry.reason
    still = set().union(*(written(patch) for patch in PATCHES if LEDGER.entry(patch).state is State.APPLIED))
    assert all(raw(key) is held for key, held in own.items() if key not in still)


@pytest.mark.every_release
@isolated("warm")
def test_shipped_declarations_fit_the_installed_upstream() -> None:
    """On the installed release every seam of every patch verifies, and verifying writes nothing."""
    from omni_fastpath.install import verify_patch

    own = upstreams_own()
    assert {patch.name: verify_patch(patch) for patch in PATCHES} == {patch.name: [] for patch in PATCHES}
    assert_holds(None, own)
