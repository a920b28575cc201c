"""The ledger: one state per patch, told to the log and to listeners when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import Field

from omni_fastpath import ledger
from omni_fastpath.declare import Counter, Options, State
from omni_fastpath.guard import guard_wrapper, raised_by_us
from omni_fastpath.ledger import Ledger
from tests.fakes.upstream import patch


class _Values(Options):
    size: int = Field(default=3)


DRUM = patch("drum", counters=(Counter("beats", "beats"), Counter("rests", "rests")), options=_Values)


@pytest.mark.parametrize("state", State)
def test_change_is_one_line_at_its_level(caplog: pytest.LogCaptureFixture, state: State) -> None:
    """A change to a state of trouble is logged as a warning, and any other at the debug level, unless one is given."""
    level = logging.WARNING if state in (State.UNSUPPORTED, State.FAILED) else logging.DEBUG
    with caplog.at_level(logging.DEBUG, "vllm.omni_fastpath"):
        Ledger().set(DRUM, state, "because")
        Ledger().set(DRUM, state, "because", level=logging.INFO)
    line = f"omni-fastpath: drum {state.value}: because"
    assert [(r.levelno, r.getMessage(), r.name) for r in caplog.records] == [
        (each, line, "vllm.omni_fastpath") for each in (level, logging.INFO)
    ]


def test_only_a_change_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Listeners and the log get a new state or reason, and nothing if both are unchanged."""
    book, heard = Ledger(), []
    book.listen(lambda *what: heard.append(what))
    with caplog.at_level(logging.DEBUG, "vllm.omni_fastpath"):
        for reason in ("one", "one", "two"):
            book.set(DRUM, State.APPLIED, reason)
    assert heard == [("drum", State.APPLIED, "one"), ("drum", State.APPLIED, "two")]
    assert len(caplog.records) == 2


def test_listener_that_raises_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A listener's exception is logged, the state is set, and later listeners are called."""
    book, heard = Ledger(), []
    book.listen(None)  # type: ignore[arg-type]
    book.listen(lambda *what: heard.append(what))
    book.set(DRUM, State.APPLIED, "yes")
    assert heard == [("drum", State.APPLIED, "yes")]
    assert book.named("drum").state is State.APPLIED
    assert "a listener for patch states failed" in caplog.text


def test_snapshot_is_plain_and_detached() -> None:
    """A snapshot is data that later changes do not reach."""
    book = Ledger()
    entry = book.entry(DRUM)
    entry.options, entry.remarks = _Values(size=5), "preview"
    book.set(DRUM, State.APPLIED, "yes")
    entry.counters["beats"] += 2
    taken = book.snapshot()
    entry.counters["beats"] += 1
    book.set(DRUM, State.OFF, "no")
    said = {"state": "applied", "reason": "yes; preview", "same_as": ""}
    assert taken == {"drum": {**said, "options": {"size": 5}, "counters": {"beats": 2, "rests": 0}}}


def test_figures_that_raise_are_read_no_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first exception of figures is logged, makes the patch failed, and removes its figures."""
    book = Ledger()
    monkeypatch.setattr(ledger, "LEDGER", book)
    monkeypatch.setattr(book.entry(DRUM), "figures", lambda: 1 / 0)
    for _ in range(2):
        assert "figures" not in book.snapshot()["drum"]
    assert caplog.text.count("drum: showing figures failed") == 1
    assert book.entry(DRUM).has_failed


def _ours(what: str) -> None:
    """Code of this package, by its module's name."""
    exec(what, {"__name__": "omni_fastpath.made_up"})  # noqa: S102 - a frame of ours, wherever this test lies


@pytest.mark.parametrize(
    ("what", "is_ours"), [("{}['gone']", True), ("import json; json.loads('{')", True), ("upstream()", False)]
)
def test_an_exception_is_whose_code_raised_it(monkeypatch: pytest.MonkeyPatch, what: str, is_ours: bool) -> None:
    """An exception of a library belongs to its caller, and one of another package does not belong to this one."""

    def upstream() -> None:
        raise KeyError("gone")

    monkeypatch.setattr("builtins.upstream", upstream, raising=False)
    with pytest.raises((KeyError, ValueError)) as caught:
        _ours(what)
    assert raised_by_us(caught.value) is is_ours


def test_a_guard_ends_in_failed_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """An exception inside is logged once and makes the patch failed for good. A cancellation is raised."""
    entry = ledger.LEDGER.entry(DRUM)
    guard = entry.guard("beating")
    with guard:
        raise KeyError("stick")
    with guard:
        raise KeyError("again")
    entry.report(State.APPLIED, "as if nothing had been")
    assert entry.state is State.FAILED
    assert entry.cause == "beating failed: KeyError('stick'); from now on only upstream's code runs"
    [record] = (each for each in caplog.records if each.exc_info)
    assert record.getMessage() == "omni-fastpath: drum: beating failed"
    with pytest.raises(KeyboardInterrupt), guard:
        raise KeyboardInterrupt


# ---- Around a wrapper ----


def _guarded(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ledger.PatchState, Any]:
    monkeypatch.setattr(ledger, "LEDGER", Ledger())
    entry = ledger.LEDGER.entry(DRUM)
    return entry, guard_wrapper(entry, wrapper, "the wrapper", lambda *_: True)


@pytest.mark.parametrize("where", ["before", "after", "never", "instead", "meant", "while handling"])
@pytest.mark.parametrize("upstream_raises", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_upstream_runs_once(where: str, upstream_raises: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets the result or exception of one call, unless the wrapper answers or raises on purpose."""
    calls: list[Any] = []

    def upstream(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        if upstream_raises:
            raise ValueError("upstream's")
        return "upstream's"

    def begins(wrapped: Any) -> str | None:
        if where == "before":
            raise KeyError("ours")
        if where == "meant":
            raise wrapped.on_purpose(KeyError("meant"))
        return "ours" if where == "instead" else None

    @contextlib.contextmanager
    def ends() -> Iterator[None]:
        try:
            yield
        except ValueError:
            if where == "while handling":
                raise KeyError("ours") from None
            raise
        if where == "after":
            raise KeyError("ours")

    def wrapper(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> str:
        if answer := begins(wrapped):
            return answer
        with ends():
            return str(wrapped(*args, **kwargs))

    async def awaited_upstream(*args: Any, **kwargs: Any) -> str:
        return upstream(*args, **kwargs)

    async def awaited_wrapper(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> str:
        if answer := begins(wrapped):
            return answer
        with ends():
            return str(await wrapped(*args, **kwargs))

    entry, around = _guarded(awaited_wrapper if is_async else wrapper, monkeypatch)

    def call() -> Any:
        found = around(awaited_upstream if is_async else upstream, None, (1,), {"two": 2})
        return asyncio.run(found) if is_async else found

    for _ in range(2):  # the second time upstream may work alone
        calls.clear()
        try:
            found = call()
        except (KeyError, ValueError) as error:
            found = error.args[0]
        is_ours = where in ("instead", "meant")
        assert found == ({"instead": "ours", "meant": "meant"}[where] if is_ours else "upstream's")
        assert calls == ([] if is_ours else [((1,), {"two": 2})])
    assert entry.has_failed is (where in ("before", "while handling" if upstream_raises else "after"))


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_that_passes_is_not_kept(
    error: type[BaseException], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that passes a guard, or a cancellation, is not kept alive until a garbage collection."""

    class Object:
        """To be referred to weakly."""

    def upstream(_given: Object) -> None:
        raise error

    async def awaited_upstream(given: Object) -> None:
        upstream(given)

    async def awaited_wrapper(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> None:
        await wrapped(*args, **kwargs)

    def wrapper(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)

    entry, around = _guarded(awaited_wrapper if is_async else wrapper, monkeypatch)
    gc.disable()
    try:
        given = Object()
        seen = weakref.ref(given)
        with contextlib.suppress(error):
            if is_async:
                around(awaited_upstream, None, (given,), {}).send(None)
            else:
                around(upstream, None, (given,), {})
        del given
        assert seen() is None
    finally:
        gc.enable()
    assert not entry.has_failed


def test_a_failed_patch_is_taken_off_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """``step_aside`` is called once after the state was set, and its exception is logged."""
    book = ledger.Ledger()
    monkeypatch.setattr(ledger, "LEDGER", book)
    entry, states = book.entry(DRUM), list[State]()

    def release() -> None:
        states.append(entry.state)
        raise KeyError

    entry.step_aside = release
    for _ in range(2):
        entry.fail("beating", ValueError())
    assert states == [State.FAILED]
    assert caplog.text.count("drum: releasing failed") == 1
