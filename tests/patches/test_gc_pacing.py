"""Full collections of the API process: put off while many are served, made at the latest at a bound, memory flat."""

from __future__ import annotations

import asyncio
import gc
import importlib
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from omni_fastpath.declare import State

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

MANY = 64


@pytest.fixture(autouse=True)
def _pythons_own() -> Iterator[None]:
    """A collector as Python begins, and as upstream leaves it: what is there already is frozen, so that it is fast."""
    from omni_fastpath.patches.gc_pacing.pacing import PYTHONS_OWN

    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS_OWN)
    gc.collect()
    gc.freeze()
    yield
    gc.set_debug(0)
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*before)


@contextmanager
def installed(**values: Any) -> Iterator[Any]:
    """The patch with these values, and no other; its entry in the ledger."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.patches.gc_pacing import PATCH

    name = "OMNI_FASTPATH_GC_PACING"
    variables = {f"{name}__{key.upper()}": str(value) for key, value in values.items()}
    apply(config.resolve([], {name: "1", **variables}, PATCHES), Process.SERVER)
    entry = LEDGER.named(PATCH.name)
    assert entry.state is State.APPLIED, entry.reason
    for counter in entry.counters:
        entry.counters[counter] = 0
    try:
        yield entry
    finally:
        uninstall(PATCH)


class Time:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


@contextmanager
def paced(live: int = MANY, **values: Any) -> Iterator[SimpleNamespace]:
    """A pacing whose looks the test makes: ``look``, ``time``, how many are ``live``, and the patch's ``entry``."""
    from omni_fastpath.ledger import runtime
    from omni_fastpath.patches.gc_pacing.pacing import Pacing

    with installed(**values) as entry:
        gc.collect()
        found = SimpleNamespace(time=Time(), live=live, entry=entry, counters=entry.counters)
        pacing = Pacing(runtime("gc_pacing"), lambda: found.live, found.time)
        found.look, found.end = pacing.look, pacing.end
        pacing.begin()
        try:
            yield found
        finally:
            pacing.end()


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


@pytest.fixture(autouse=True)
def _no_nodes() -> None:
    gc.collect()
    assert not Node.alive


def full_collections() -> int:
    """Of this process since it began."""
    return int(gc.get_stats()[2]["collections"])


def old_garbage() -> None:
    """A cycle that nobody knows, in the oldest generation."""
    node = Node()
    make_due()
    del node


# ---- When ----


def test_python_makes_no_full_collection_by_itself() -> None:
    """What makes stock Python do it, many objects that live on, does not under the patch; young ones are collected."""

    def grow() -> int:
        gc.collect()
        before = full_collections()
        kept: list[Any] = []
        for _ in range(400_000):
            kept.append([kept])
        return full_collections() - before

    assert grow() > 0
    with paced():
        young = gc.get_stats()[0]["collections"]
        assert grow() == 0
        assert gc.get_stats()[0]["collections"] > young + 100


def test_one_that_is_due_is_made_while_few_are_live() -> None:
    """Up to ``few``, and not before Python would want one; what it frees is freed."""
    with paced(few=3) as pacing:
        pacing.live = 3
        pacing.look()
        assert pacing.counters["quiet"] == 0  # none is due
        old_garbage()
        pacing.live = 4
        pacing.look()
        assert pacing.counters["quiet"] == 0
        assert len(Node.alive) == 1
        pacing.live = 3
        pacing.look()
        assert pacing.counters == {"quiet": 1, "late": 0, "frozen": 0}
        assert not Node.alive


def test_it_waits_no_longer_than_stated() -> None:
    """After ``at_most_s`` it is made under load; the time counts from the last one."""
    with paced(at_most_s=60) as pacing:
        for _ in range(2):
            old_garbage()
            pacing.time.now_s += 59.9
            pacing.look()
            assert len(Node.alive) == 1
            pacing.time.now_s += 0.1
            pacing.look()
            assert not Node.alive
        assert pacing.counters == {"quiet": 0, "late": 2, "frozen": 0}


def test_it_waits_for_no_more_objects_than_stated() -> None:
    """With ``at_most_objects`` more than after the last one it is made under load."""
    with paced(at_most_objects=200_000) as pacing:
        old_garbage()
        pacing.look()
        assert len(Node.alive) == 1
        kept = [[number] for number in range(250_000)]
        pacing.look()
        assert pacing.counters["late"] == 1
        assert not Node.alive
        make_due()
        pacing.look()  # it counts from here
        assert pacing.counters["late"] == 1
        del kept


def test_quiet_ones_take_a_thousandth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause of 20 ms the next that only few wait for comes 20 s later."""
    ticks = iter([10.0, 10.02, 20.0, 20.02])
    with paced(live=1) as pacing:
        monkeypatch.setattr("omni_fastpath.patches.gc_pacing.pacing.perf_counter", lambda: next(ticks))
        for at_s, made in ((0.0, 1), (19.9, 1), (20.1, 2)):
            make_due()
            pacing.time.now_s = 1000.0 + at_s
            pacing.look()
            assert pacing.counters["quiet"] == made


# ---- The freeze ----


def test_the_start_is_frozen_once_and_with_nobody_there() -> None:
    """Not while one is live, not at a bound, not twice; later cycles are freed as ever."""
    with paced(at_most_s=1) as pacing:
        before, kept = gc.get_freeze_count(), [[number] for number in range(2000)]
        for live in (1, MANY):
            pacing.live = live
            pacing.time.now_s += 1000
            make_due()
            pacing.look()
        assert (pacing.counters["quiet"], pacing.counters["late"]) == (1, 1)
        assert gc.get_freeze_count() == before
        pacing.live = 0
        for _ in range(2):
            old_garbage()
            pacing.time.now_s += 1000
            pacing.look()
            assert not Node.alive
        assert pacing.counters["quiet"] == 3
        assert pacing.counters["frozen"] > len(kept)
        assert gc.get_freeze_count() - before > len(kept)


def test_it_can_be_left_out() -> None:
    """``freeze: false`` collects and freezes nothing."""
    with paced(live=0, freeze=False) as pacing:
        before = gc.get_freeze_count()
        make_due()
        pacing.look()
        assert pacing.counters == {"quiet": 1, "late": 0, "frozen": 0}
        assert gc.get_freeze_count() == before


# ---- Memory ----


@pytest.mark.parametrize(
    ("live", "values", "most"),
    [
        (MANY, {"at_most_s": 60}, 70 * 20),  # a minute's requests, and what came until the next look
        (MANY, {"at_most_objects": 10_000}, 5_000),
        (0, {}, 2_000),
    ],
)
def test_an_hour_of_cyclic_garbage_keeps_memory_flat(live: int, values: dict[str, Any], most: int) -> None:
    """Each request leaves cycles that only a full collection frees: what waits never exceeds the bound, to the end."""
    with paced(live=live, **values) as pacing:
        waiting = []
        for second in range(3600):
            pacing.time.now_s += 1.0
            for _ in range(20 if second % 60 < 30 else 0):  # requests that end in this second
                node = Node()
                node.__dict__["record"] = [[node] for _ in range(3)]
            if second % 3 == 0:
                gc.collect(1)  # they are old by then
            pacing.look()
            waiting.append(len(Node.alive))
        assert max(waiting) <= most
        assert max(waiting[1800:]) <= max(waiting[:1800]) * 1.5
        assert sum(waiting) > 0


# ---- Others' settings, and errors ----


@every_release
@pytest.mark.parametrize("setting", ["gc.disable()", "gc.set_debug()", "gc.set_threshold(50000, 20, 20)"])
async def test_an_operators_own_setting_wins(setting: str) -> None:
    """From the beginning: nothing is touched, and the state says what was found."""

    def thresholds_now() -> tuple[Any, ...]:
        return gc.get_threshold(), gc.isenabled(), gc.get_debug()

    if "disable" in setting:
        gc.disable()
    elif "debug" in setting:
        gc.set_debug(gc.DEBUG_UNCOLLECTABLE)
    else:
        gc.set_threshold(50_000, 20, 20)
    before = thresholds_now()
    with installed() as entry:
        async with serving():
            assert thresholds_now() == before
            assert entry.state is State.NOT_APPLICABLE
            assert setting in entry.reason
    assert thresholds_now() == before


@pytest.mark.parametrize("live", [0, MANY])
def test_a_later_setting_wins_too(live: int) -> None:
    """Somebody's thresholds stay theirs, and nothing is collected any more."""
    with paced(live=live, at_most_s=1) as pacing:
        gc.set_threshold(900, 9, 9)
        pacing.time.now_s += 1000
        make_due()
        pacing.look()
        assert pacing.entry.state is State.NOT_APPLICABLE
        assert pacing.counters == {"quiet": 0, "late": 0, "frozen": 0}
        pacing.end()
        assert gc.get_threshold() == (900, 9, 9)


@every_release
async def test_an_error_of_ours_gives_python_its_thresholds_back() -> None:
    """It is told once, and Python collects as ever."""
    from omni_fastpath.ledger import runtime
    from omni_fastpath.patches.gc_pacing.pacing import Pacing

    before = gc.get_threshold()
    with installed() as entry:
        pacing = Pacing(runtime("gc_pacing"), lambda: 1 // 0)
        pacing.begin()
        make_due()
        pacing.look_on(asyncio.get_running_loop())
        assert entry.state is State.FAILED
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
            assert gc.get_threshold() != before
            served = front_end("one", "two")
            served.__class__ = Unhashable
            served._log_summary_and_cleanup("one")
            assert list(served.request_states) == ["two"]
            assert entry.state is State.FAILED
            assert "unhashable" in entry.reason
            assert gc.get_threshold() == before
            served._log_summary_and_cleanup("two")
            assert not served.request_states


# ---- In a server ----


def front_end(*requests: str) -> Any:
    """Upstream's, without an engine, with these requests."""
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.client_request_state import ClientRequestState

    found = object.__new__(AsyncOmni)
    found.engine = SimpleNamespace(shutdown=lambda: None)
    found.log_stats = False
    found.request_states = {each: ClientRequestState(each) for each in requests}
    found._consumed_metric_messages = {}  # up to 0.28
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


async def seen(counters: dict[str, int], name: str) -> None:
    """Wait until it counted."""
    for _ in range(1000):
        if counters[name]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} did not count: {counters}")


@every_release
async def test_a_server_is_paced_from_upstreams_freeze_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own lifespan and clean-up: put off at the freeze, made after the last request's end, with a freeze."""
    monkeypatch.setattr("omni_fastpath.patches.gc_pacing.pacing.LOOK_S", 0.01)
    monkeypatch.setattr("omni_fastpath.patches.gc_pacing.wrappers.LOOK_S", 0.01)
    before = gc.get_threshold()
    with installed(few=1) as entry:
        assert gc.get_threshold() == before
        async with serving():
            assert gc.get_freeze_count() > 0  # upstream's
            assert gc.get_threshold() == (*before[:2], 10_000)
            make_due()
            await asyncio.sleep(0.05)
            assert entry.counters["quiet"] == 0  # nobody knows yet how many are live
            served = front_end("one", "two", "three")
            served._log_summary_and_cleanup("one")
            assert list(served.request_states) == ["two", "three"]
            await asyncio.sleep(0.05)
            assert entry.counters["quiet"] == 0
            served._log_summary_and_cleanup("two")
            await seen(entry.counters, "quiet")
            assert entry.counters["frozen"] == 0
            served._log_summary_and_cleanup("three")
            monkeypatch.setattr("omni_fastpath.patches.gc_pacing.pacing.monotonic", lambda: 0)  # the real one is taken
            make_due()
            await seen(entry.counters, "frozen")
            assert entry.state is State.APPLIED
    assert gc.get_threshold() == before


@every_release
async def test_taken_off_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thresholds are Python's again at once, and the timer makes nothing any more."""
    monkeypatch.setattr("omni_fastpath.patches.gc_pacing.pacing.LOOK_S", 0.01)
    monkeypatch.setattr("omni_fastpath.patches.gc_pacing.wrappers.LOOK_S", 0.01)
    before = gc.get_threshold()
    with installed() as entry:
        async with serving():
            front_end("one")._log_summary_and_cleanup("one")
            from omni_fastpath.install import uninstall

            uninstall(entry.patch)
            assert gc.get_threshold() == before
            make_due()
            await asyncio.sleep(0.05)
            assert entry.counters == {"quiet": 0, "late": 0, "frozen": 0}


@every_release
def test_a_library_users_process_is_left_alone() -> None:
    """Without an API server nothing of the collector changes, whatever ends."""
    before = gc.get_threshold()
    with installed() as entry:
        served = front_end("one", "two")
        served._log_summary_and_cleanup("one")
        assert list(served.request_states) == ["two"]
        assert gc.get_threshold() == before
        assert entry.counters == {"quiet": 0, "late": 0, "frozen": 0}


def test_duplex_sessions_count() -> None:
    """A session is live like a request; a front end nobody knows may have any number."""
    from omni_fastpath.patches.gc_pacing.pacing import live

    two = SimpleNamespace(request_states={"a": 1}, sessions={"b": 2})
    one = SimpleNamespace(request_states={"c": 1})
    assert live([two, one]) == 3
    assert live([]) > 10_000
