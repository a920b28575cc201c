"""Every patch that ships, on the real upstream: in any order of import, install and undo.

Each case runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.config import resolve
from omni_fastpath.declare import Fit, Process, Relies, State, Wrap
from omni_fastpath.install import row_here, seams_in, state_here
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from tests.fakes.processes import isolated
from tests.fakes.registration import Key, is_ours, raw, written

LOOKS: tuple[Any, ...] = (
    *(inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction, inspect.signature),
    *map(attrgetter, ("__name__", "__qualname__", "__module__", "__doc__")),
)


def slots() -> dict[Key, Any]:
    """The raw slots that patches write, of one for servers and stages those of servers, with modules imported."""
    rows = [row for row in map(row_here, PATCHES) if isinstance(row, Fit)]
    seams = [seam for row in rows for seam in seams_in(row, Process.SERVER) if not isinstance(seam, Relies)]
    return {(seam.module, seam.qualname): raw((seam.module, seam.qualname)) for seam in seams}


def ours_anywhere() -> set[str]:
    """The attributes of imported vLLM and vLLM-Omni modules and classes that hold a wrapper of this package."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"vllm", "vllm_omni"}:
            for attribute, value in list(vars(module).items()):
                found[f"{name}:{attribute}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}:{attribute}.{inner}": slot for inner, slot in vars(value).items()}
    return {key for key, value in found.items() if is_ours(value)}


def assert_holds(own: dict[Key, Any], *names: str) -> None:
    """The slots of these patches hold one wrapper per patch above upstream's own objects, and all others hold those."""
    for key, stock in own.items():
        found = raw(key)
        for _ in [name for name in names if key in written(name)]:
            assert is_ours(found), key
            found = None if stock is None else found.__wrapped__
        assert found is stock, key


@pytest.mark.every_release
@isolated("warm")
def test_every_function_is_as_it_was_read() -> None:
    """Every function and class that a row names has its recorded fingerprint, also in rows without an install."""
    from omni_fastpath.seams import verify

    release = vllm_omni_release()
    assert release is not None
    for patch in PATCHES:
        row = row_here(patch)
        assert row is not None
        for seam in row.seams:
            verify(seam, release.version)


@pytest.mark.every_release
@isolated("warm")
def test_every_slot_looks_and_refuses_as_upstreams_function() -> None:
    """``inspect`` sees the same, and a call with wrong arguments raises the same at once and is no failure of ours."""
    from omni_fastpath.install import _installed, install
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.seams import function_in

    for patch in PATCHES:
        install(patch)
    slots = [each for written in _installed.values() for each in written if isinstance(each[0].seam, Wrap)]
    refused = 0
    for slot, _, ours in slots:
        stock, found = function_in(ours), ours
        if inspect.isclass(slot.owner):
            stock, found = (each.__get__(SimpleNamespace(), slot.owner) for each in (stock, found))
        for look in LOOKS:
            assert look(found) == look(stock), (slot.seam.path, look)
        for args, kwargs in (((), {}), ((), {"made_up": 1}), ((None,) * 50, {})):
            with contextlib.suppress(TypeError):
                inspect.signature(stock).bind(*args, **kwargs)
                continue  # upstream takes them
            said = []
            for each in (stock, found):
                with pytest.raises(TypeError) as error:
                    each(*args, **kwargs)
                said.append(str(error.value))
            assert said[0] == said[1]
            refused += 1
    assert refused > len(slots) > 20
    assert {entry.state for entry in LEDGER} <= {State.APPLIED, State.SUPERSEDED, State.NOT_APPLICABLE}


@pytest.mark.every_release
@isolated("warm")
def test_all_patches_together_and_off_again() -> None:
    """After two installations each slot is wrapped once per patch, and after uninstalling it has its own object."""
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER

    own, on = slots(), resolve(None, {patch.env: "1" for patch in PATCHES}, PATCHES)
    of_server = [patch for patch in PATCHES if Process.SERVER in patch.processes]
    assert ours_anywhere() == set()
    for _ in range(2):
        apply(on, Process.SERVER, of_server)
        apply(on, Process.STAGE, [patch for patch in PATCHES if patch not in of_server])  # which no real process does
        assert {entry.patch.name: entry.state for entry in LEDGER} == {each.name: state_here(each) for each in PATCHES}
        assert_holds(own, *on.enabled)
    for patch in reversed(PATCHES):
        uninstall(patch)
    assert_holds(own)
    assert ours_anywhere() == set()
    # 0.32 does some of them itself, and 0.28 has no use for another.
    assert {entry.state for entry in LEDGER} <= {State.OFF, State.SUPERSEDED, State.NOT_APPLICABLE}
