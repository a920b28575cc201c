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


def test_an_import_of_a_function_is_found() -> None:
    """Under another name, off a class or off a module; classes and constants are none."""
    tree = ast.parse(
        "from janus import Queue, SyncQueueShutDown as gone\n"
        "import janus\n"
        "import janus as other\n"
        "Queue._put, gone, janus.Queue.close, other.AsyncQueue, other.AsyncQueue.get, Queue.no_such_thing\n"
    )
    found = {source: path for path, source in functions_named(tree, {"janus"})}
    assert found == {
        "Queue._put": "janus:Queue._put",
        "janus.Queue.close": "janus:Queue.close",
        "other.AsyncQueue.get": "janus:AsyncQueue.get",
    }


# ---- The tracer ----

_UPSTREAM: dict[str, Any] = {"__name__": "vllm_omni.made_for_a_test"}
exec(  # noqa: S102 - functions whose module is upstream's
    """
import asyncio

class Base:
    def method(self):
        return self.inner()
    def inner(self):
        return 1
    async def waits(self):
        await asyncio.sleep(0)
        return self.inner()

class Pool(Base):
    pass

def free():
    return 1
""",
    _UPSTREAM,
)
_OURS: dict[str, Any] = {"__name__": "omni_fastpath.patches.nonblocking_dequeue.made_for_a_test"}
exec(  # noqa: S102 - lines whose file is a patch's
    """
def call(what):
    return what()

async def wait(what):
    return await what()
""",
    _OURS,
)
_Pool: Any = _UPSTREAM["Pool"]


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (lambda pool: _OURS["call"](pool.method), "Base.method"),
        (lambda pool: _OURS["call"](functools.partial(pool.method)), "Base.method"),
        (lambda _: _OURS["call"](_UPSTREAM["free"]), "free"),
        (lambda pool: asyncio.run(_OURS["wait"](pool.waits)), "Base.waits"),
        (lambda pool: pool.method(), None),
    ],
    ids=["inherited", "through C", "function", "awaited", "by nobody of ours"],
)
def test_what_the_tracer_sees(does: Any, expected: str | None) -> None:
    """The function that a patch's line calls, by where upstream defines it, and not what that function calls."""
    with UpstreamCalls(PATCHES) as seen:
        does(_Pool())
    undeclared = seen.undeclared()
    if expected is None:
        assert undeclared == []
    else:
        (line,) = undeclared
        assert line.startswith(f"nonblocking_dequeue calls vllm_omni.made_for_a_test:{expected} at ")
