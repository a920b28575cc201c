"""Full collections of the API process: put off while many are served, made at the latest at a bound."""

from __future__ import annotations

import asyncio
import gc
import importlib
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from omni_fastpath.declare import State
from tests.patches.drive import only

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

MANY = 64
WRAPPERS = "omni_fastpath.patches.gc_pacing.wrappers"


@pytest.fixture(autouse=True)
def _pythons_own() -> Iterator[None]:
    """A collector as Python begins, and as upstream leaves it: what is there already is frozen, so that it is fast."""
    from omni_fastpath.patches.gc_pacing import PATCH

    before = gc.get_threshold()
    from omni_fastpath.ledger import LEDGER

    LEDGER.entry(PATCH)  # the wrappers look it up when they are imported
    gc.set_threshold(*importlib.import_module(WRAPPERS).PYTHONS_OWN)
    gc.collect()
    gc.freeze()
    yield
    gc.set_debug(0)
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


def installed(**values: Any) -> AbstractContextManager[Any]:
    """The patch with these values, and no other; its entry in the ledger."""
    return only("gc_pacing", **values)


@contextmanager
def paced(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Iterator[SimpleNamespace]:
    """A pacing whose looks the test makes: ``look``, the time ``now_s``, how many are ``live``, and ``counters``."""
    with installed(**values) as entry:
        wrappers = importlib.import_module(WRAPPERS)
        found = SimpleNamespace(now_s=1000.0, live=MANY, entry=entry, counters=entry.counters)
        monkeypatch.setattr(wrappers, "monotonic", lambda: found.now_s)
        monkeypatch.setattr(wrappers, "live", lambda: found.live)
        gc.collect()
        pacing = wrappers.Pacing()
        wrappers._running.append(pacing)
        found.look = pacing.look
        yield found


def make_due() -> None:
    """What Python's own first rule asks for: more than ten collections of the middle generation."""
    for _ in range(11):
        gc.collect(1)


class Node:
    """Something that only a collection can free."""

    alive: ClassVar[weakref.WeakSet[Node]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.itself = self
        self.alive.add(self)


def old_garbage() -> None:
    """A cycle that nobody knows, in the oldest generation."""
    node = Node()
    make_due()
    del node


# ---- When ----


def test_one_that_is_due_is_made_while_few_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to ``few``, and not before Python would want one; what it frees is freed."""
    with paced(monkeypatch, few=3) as pacing:
        pacing.live = 3
        pacing.look()
        assert pacing.counters["quiet"] == 0  # none is due
        old_garbage()
        pacing.live = 4
        pacing.look()
        assert (pacing.counters["quiet"], len(Node.alive)) == (0, 1)
        pacing.live = 3
        pacing.look()
        assert pacing.counters == {"quiet": 1, "late": 0}
        assert not Node.alive


def test_it_waits_no_longer_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``at_most_s`` it is made under load, so that garbage is bounded; the time counts from the last one."""
    with paced(monkeypatch, at_most_s=60) as pacing:
        for _ in range(2):
            old_garbage()
            pacing.now_s += 59.9
            pacing.look()
            assert len(Node.alive) == 1
            pacing.now_s += 0.1
            pacing.look()
            assert not Node.alive
        assert pacing.counters == {"quiet": 0, "late": 2}


# ---- Others' settings, and errors ----


@every_release
@pytest.mark.parametrize("setting", ["gc.disable()", "gc.set_debug()", "gc.set_threshold(50000, 20, 20)"])
async def test_an_operators_own_setting_wins(setting: str) -> None:
    """From the beginning: nothing is touched, and the state says what was found."""

    def settings_now() -> tuple[Any, ...]:
        return gc.get_threshold(), gc.isenabled(), gc.get_debug()

    if "disable" in setting:
        gc.disable()
    elif "debug" in setting:
        gc.set_debug(gc.DEBUG_UNCOLLECTABLE)
    else:
        gc.set_threshold(50_000, 20, 20)
    before = settings_now()
    with installed() as entry:
        async with serving():
            assert settings_now() == before
            assert entry.state is State.NOT_APPLICABLE
            assert setting in entry.reason
    assert settings_now() == before


def test_a_later_setting_wins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's thresholds stay as they are, and nothing is collected any more."""
    with paced(monkeypatch, at_most_s=1) as pacing:
        gc.set_threshold(900, 9, 9)
        pacing.now_s += 1000
        make_due()
        pacing.look()
        assert pacing.entry.state is State.NOT_APPLICABLE
        assert pacing.counters == {"quiet": 0, "late": 0}
    assert gc.get_threshold() == (900, 9, 9)


@every_release
async def test_an_error_of_ours_gives_python_its_thresholds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state says so, and Python collects as ever."""
    before = gc.get_threshold()
    monkeypatch.setattr(f"{WRAPPERS}.live", lambda: 1 // 0)
    monkeypatch.setattr(f"{WRAPPERS}.LOOK_S", 0.001)
    with installed() as entry:
        async with serving():
            make_due()
            await until(lambda: entry.state is State.FAILED)
            assert "ZeroDivisionError" in entry.reason
            assert gc.get_threshold() == before


@every_release
async def test_an_error_of_ours_does_not_reach_a_requests_end() -> None:
    """A front end that cannot be kept in a weak set: its request ends as upstream's does, and the patch steps aside."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    class Unhashable(AsyncOmni):  # type: ignore[misc] # upstream has no types
        __hash__ = None  # type: ignore[assignment]

    before = gc.get_threshold()
    with installed() as entry:
        async with serving():
            served = front_end("one", "two")
            served.__class__ = Unhashable
            served._log_summary_and_cleanup("one")
            assert list(served.request_states) == ["two"]
            assert entry.state is State.FAILED
            assert gc.get_threshold() == before


# ---- In a server ----


def front_end(*requests: str) -> Any:
    """Upstream's, without an engine, with these requests."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.client_request_state import ClientRequestState

    found = object.__new__(AsyncOmni)
    found.engine = SimpleNamespace(shutdown=lambda: None)
    found.log_stats = False
    found.request_states = {each: ClientRequestState(each) for each in requests}
    found._consumed_metric_messages = {}  # on 0.28
    return found


@asynccontextmanager
async def serving() -> AsyncIterator[None]:
    """Upstream's own start and end of an API server's app, from the module that the installed release's row names."""
    from fastapi import FastAPI

    from omni_fastpath.install import seams_here
    from omni_fastpath.patches.gc_pacing import PATCH

    app = FastAPI()
    app.state.log_stats = False
    async with importlib.import_module(seams_here(PATCH)[0].module).lifespan(app):
        yield


async def until(is_so: Any) -> None:
    """Wait for something to become true."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not become true")


@every_release
async def test_a_server_is_paced_from_upstreams_freeze_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own lifespan and clean-up: put off at the freeze, made when few are left, stopped when taken off."""
    from omni_fastpath.install import uninstall

    monkeypatch.setattr(f"{WRAPPERS}.LOOK_S", 0.01)
    before = gc.get_threshold()
    with installed(few=1) as entry:
        assert gc.get_threshold() == before
        async with serving():
            assert gc.get_freeze_count() > 0  # upstream's
            assert gc.get_threshold() == (*before[:2], 10_000)
            make_due()
            await asyncio.sleep(0.05)
            assert entry.counters["quiet"] == 0  # nothing is known yet of how many are live
            served = front_end("one", "two", "three")
            served._log_summary_and_cleanup("one")
            assert list(served.request_states) == ["two", "three"]
            await asyncio.sleep(0.05)
            assert entry.counters["quiet"] == 0
            served._log_summary_and_cleanup("two")
            await until(lambda: entry.counters["quiet"] == 1)
            uninstall(entry.patch)
            assert gc.get_threshold() == before
            make_due()
            await asyncio.sleep(0.05)
            assert entry.counters == {"quiet": 1, "late": 0}
