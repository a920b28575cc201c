"""Every upstream function that a patch calls is a seam of that patch: nothing that we rely on can move unseen.

By the syntax tree, what is imported; by a tracer, what is called while the other tests of this folder run (`--traced`).
"""

from __future__ import annotations

import ast
import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.declare import Patch
from omni_fastpath.patches import PATCHES
from tests.patches.upstream_calls import UPSTREAM, UpstreamCalls, declared_by, functions_named

FOLDER = Path(__file__).resolve().parents[2] / "patches"
each_patch = pytest.mark.parametrize("patch", PATCHES, ids=[patch.name for patch in PATCHES])


# ---- What is imported ----


def _trees(patch: Patch) -> dict[str, ast.Module]:
    return {file.name: ast.parse(file.read_text()) for file in sorted((FOLDER / patch.name).glob("*.py"))}


@pytest.mark.upstream
@each_patch
def test_functions_imported_are_seams(patch: Patch) -> None:
    """A function that a patch imports from upstream, or reads off a class or module of upstream's, is its seam."""
    declared = declared_by(patch, PATCHES, anywhere=True)
    missing = [
        f"{name}: {source} is {path}"
        for name, tree in _trees(patch).items()
        for path, source in functions_named(tree, UPSTREAM)
        if path not in declared
    ]
    assert not missing, "\n".join(missing)


# ---- The tracer ----

_UPSTREAM: dict[str, Any] = {"__name__": "vllm_omni.made_for_a_test"}
exec(  # noqa: S102 - functions whose module is upstream's
    """
import asyncio

class Base:
    def inner(self):
        return 1
    async def waits(self):
        await asyncio.sleep(0)
        return self.inner()

class Pool(Base):
    pass
""",
    _UPSTREAM,
)
_OURS: dict[str, Any] = {"__name__": "omni_fastpath.patches.nonblocking_dequeue.made_for_a_test"}
exec("async def wait(what):\n    return await what()\n", _OURS)  # noqa: S102 - a line whose file is a patch's


def test_the_tracer_sees_a_call() -> None:
    """By where upstream defines the function, inherited, through C and awaited; not what that function calls."""
    with UpstreamCalls(PATCHES) as seen:
        asyncio.run(_OURS["wait"](functools.partial(_UPSTREAM["Pool"]().waits)))
    [line] = seen.undeclared()
    assert line.startswith("nonblocking_dequeue calls vllm_omni.made_for_a_test:Base.waits at ")
