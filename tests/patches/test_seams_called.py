"""Every upstream function that a patch calls is a seam of that patch: nothing that we rely on can move unseen.

By the syntax tree, what is imported; by a tracer (`tests.patches.upstream_calls`), what is called while content runs.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import gc
import inspect
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import janus
import pytest
import wrapt

from omni_fastpath.declare import Patch, Pin, Replace, Wrap
from omni_fastpath.install import seams_here
from omni_fastpath.patches import PATCHES
from omni_fastpath.seams import find
from tests.patches.upstream_calls import UPSTREAM, UpstreamCalls, _path_of, declared_by, functions_named, tasks_made

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


@each_patch
def test_no_call_hides_in_a_task(patch: Patch) -> None:
    """No patch makes a task of what upstream's is: the tracer would see the event loop call it."""
    made = [source for tree in _trees(patch).values() for source in tasks_made(tree)]
    assert [source for source in made if source != "asyncio.ensure_future(self._shutdown.wait())"] == []


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


# ---- What is called, while content runs ----


def _fleets(folder: Path) -> None:
    """Of the orchestrator and of a stage; what they say is judged by their own tests."""
    from benchmarks.save_queue.rig import stage_configs
    from tests.fleets.stage import runs
    from tests.fleets_dispatch.compare import verdicts

    assert len([*verdicts(range(8)), *runs(range(6), stage_configs(folder), faults="none")]) == 14


async def _front_end(*, event_driven: bool) -> None:
    """Upstream's own loop of the front end takes what waits, and then what comes."""
    from vllm_omni.engine.messages import ErrorMessage

    from benchmarks.rigs.inprocess import front_end

    pipeline: Any = SimpleNamespace(outputs=janus.Queue(), writer=None, thread=threading.current_thread())
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    found = front_end(pipeline, {"one": inbox}, event_driven=event_driven)
    found._final_output_handler()
    for burst in (1, 100):
        for number in range(burst):
            pipeline.outputs.sync_q.put(ErrorMessage(error=str(number), request_id="one", fatal=False))
        for number in range(burst):
            assert (await inbox.get()).error == str(number)
    found.final_output_task.cancel()
    await asyncio.gather(found.final_output_task, return_exceptions=True)


def _lean(folder: Path) -> None:
    """What the opt-in patches of the API process do for a request and for its end."""
    from tests.fleets_dispatch import compare
    from tests.patches import test_lean_front_end as front_end
    from tests.patches import test_lean_reader as reader
    from tests.patches import test_lean_stream as stream
    from tests.patches.test_lean_processing import TOO, switched_on

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compare, "switched_on", functools.partial(switched_on, TOO))
        assert len([*compare.verdicts(range(4))]) == 4
    with front_end.switched_on():
        for seed in range(8):
            front_end.aggregator(seed).build_and_log_summary()
    with stream.switched_on(unneeded="once") as counters:
        asyncio.run(stream.written())
        assert counters["events"]
    with reader.switched_on() as entry:
        reader.read(folder, 30)
        assert entry.counters["tensors"]


async def _served() -> None:
    """An API server's start, with the freeze at its end, and a request's clean-up."""
    from tests.patches.test_gc_pacing import front_end, installed, serving

    with installed():
        async with serving():
            front_end("one")._log_summary_and_cleanup("one")
    gc.unfreeze()


def _observed() -> None:
    """An orchestrator and a front end that are observed."""
    from tests.patches.drive import run
    from tests.patches.test_queue_metrics import counts, filled, observed

    with observed():
        run(filled(event_driven=False))
        asyncio.run(asyncio.wait_for(_front_end(event_driven=False), 30))
        assert counts("residence_seconds")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> UpstreamCalls:
    """What the patches called of upstream's, in both modes of the orchestrator and on both stages."""
    from tests.patches.drive import switched_on

    with UpstreamCalls(PATCHES) as found:
        _fleets(tmp_path_factory.mktemp("stages"))
        _lean(tmp_path_factory.mktemp("sockets"))
        asyncio.run(_served())
        _observed()
        with switched_on():
            for event_driven in (False, True):
                asyncio.run(asyncio.wait_for(_front_end(event_driven=event_driven), 30))
    return found


@pytest.mark.upstream
@pytest.mark.filterwarnings("ignore")  # upstream's, of sparse and complex tensors
@each_patch
def test_functions_called_are_seams(calls: UpstreamCalls, patch: Patch) -> None:
    """Nothing but its own seams, and those of the patches without which it is not installed."""
    assert [line for line in calls.undeclared() if line.startswith(f"{patch.name} ")] == []


@pytest.mark.upstream
@pytest.mark.filterwarnings("ignore")
@each_patch
def test_the_content_reached_every_wrapper(calls: UpstreamCalls, patch: Patch) -> None:
    """The run above is worth something: each method of upstream's that a patch wraps was called through its wrapper."""
    wrapped = {
        _path_of(find(seam).raw(), UPSTREAM) or seam.path  # where it is defined, whoever has imported it
        for seam in seams_here(patch)
        if isinstance(seam, Wrap)
        and seam.module.split(".")[0] in UPSTREAM
        # A coroutine that a wrapper hands on runs for whoever awaits it.
        and not inspect.iscoroutinefunction(inspect.unwrap(find(seam).raw()))
    }
    assert {path for path in wrapped if not path.endswith(".__init__")} <= calls.found[patch.name].keys()
    # One that takes a function's place, and calls nothing, leaves no call: its content asserts that it ran.
    assert calls.found[patch.name] or all(isinstance(seam, (Pin, Replace)) for seam in seams_here(patch))


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
    @staticmethod
    def static():
        return 1
    @classmethod
    def of_class(cls):
        return 1
    @property
    def attribute(self):
        return 1
    def __len__(self):
        return 1
    async def waits(self):
        await asyncio.sleep(0)
        return self.inner()
    def gives(self):
        yield self.inner()

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

def look(pool):
    return pool.attribute, len(pool)

def every(what):
    return list(what()), list(map(lambda _: what(), [1]))
""",
    _OURS,
)
_OTHERS: dict[str, Any] = {"__name__": "omni_fastpath.patches.budgeted_drain.made_for_a_test"}
exec(  # noqa: S102 - a wrapper of another patch
    """
def wrapped_method(wrapped, instance, args, kwargs):
    return 1
""",
    _OTHERS,
)


_Pool: Any = _UPSTREAM["Pool"]


class _Double(_Pool):  # type: ignore[misc]
    """As a rig's, which overrides what it does not want."""

    def method(self) -> int:
        return 2


def _wrapped() -> Any:
    """A pool whose method another patch has wrapped."""

    class Wrapped(_Pool):  # type: ignore[misc]
        method = wrapt.FunctionWrapper(_UPSTREAM["Base"].method, _OTHERS["wrapped_method"])

    return Wrapped()


def _on_a_thread(what: Any) -> None:
    thread = threading.Thread(target=_OURS["call"], args=(what,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (lambda pool: _OURS["call"](pool.method), "Base.method"),
        (lambda pool: _OURS["call"](pool.static), "Base.static"),
        (lambda pool: _OURS["call"](pool.of_class), "Base.of_class"),
        (lambda pool: _OURS["call"](functools.partial(pool.method)), "Base.method"),
        (lambda pool: _OURS["every"](pool.gives), "Base.gives"),
        (lambda _: _OURS["call"](_UPSTREAM["free"]), "free"),
        (lambda pool: asyncio.run(_OURS["wait"](pool.waits)), "Base.waits"),
        (lambda pool: _on_a_thread(pool.method), "Base.method"),
        (lambda _: _OURS["call"](_Double().method), "Base.method"),
        (lambda _: _OURS["call"](_wrapped().method), "Base.method"),
        (_OURS["look"], None),
        (lambda pool: pool.method(), None),
    ],
    ids=[
        *("inherited", "static", "of the class", "through C", "generator", "function", "awaited", "other thread"),
        *("overridden by a rig", "wrapped by a patch", "attribute and protocol", "called by nobody of ours"),
    ],
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
    assert not seen.found["budgeted_drain"]


def test_the_tracer_takes_itself_off() -> None:
    """Afterwards nothing is seen, by a thread that was started meanwhile neither."""
    ready, over = threading.Event(), threading.Event()

    def late() -> None:
        ready.set()
        over.wait(10)
        _OURS["call"](_UPSTREAM["free"])

    with UpstreamCalls(PATCHES) as seen:
        thread = threading.Thread(target=late)
        thread.start()
        ready.wait(10)
    over.set()
    thread.join()
    _OURS["call"](_UPSTREAM["free"])
    assert seen.undeclared() == []
