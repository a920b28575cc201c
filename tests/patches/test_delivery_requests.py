"""Incoming requests: which count and until when, and how long outputs wait for them, on upstream's own objects.

Of the applications in an engine's process only that of upstream's API server is acted on.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import httpx
import pytest

from omni_fastpath import connection
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.connections import API_SERVER
from omni_fastpath.patches.delivery import incoming
from tests.patches.drive import engine_without_stages, front_end_takes, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

PATH = "/v1/chat/completions"


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The patch alone, with a time limit that a pause of the machine does not reach."""
    importlib.import_module(API_SERVER)  # without it the application is left alone
    with only("delivery") as entry:
        monkeypatch.setattr(incoming, "LONGEST_WAY_S", 60)
        yield entry
        assert on_the_way() == 0


def on_the_way() -> int:
    """How many requests are incoming."""
    return len(incoming.ON_THEIR_WAY)


# ---- Which requests count, and until when ----


def _application(answer: Any, *, is_upstreams: bool = True) -> Any:
    """An application of one route, which is `answer` after the body."""
    from fastapi import FastAPI
    from starlette.responses import JSONResponse

    async def route(request: Any) -> Any:
        await request.body()
        return JSONResponse(await answer())

    app = FastAPI()
    if is_upstreams:
        app.state.openai_serving_models = None
    app.add_route("/{path:path}", route, methods=["POST", "GET"])
    return app


async def ask(answer: Any, path: str = PATH, method: str = "POST", app: Any = None) -> int:
    """Ask upstream's application with this answer, or another one: the status, or the exception that it raises."""
    transport = httpx.ASGITransport(app or _application(answer))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return (await client.request(method, path)).status_code


async def submit(refused: bool = False) -> None:
    """Submit a request to upstream's engine, whose fake processing of inputs may refuse it."""

    def add_request(*_args: Any, **_kwargs: Any) -> None:
        if refused:
            raise ValueError

    await engine_without_stages(add_request).add_request_async(request_id="one", prompt="Hello.")


async def test_a_request_counts_in_whichever_context_it_comes(on: Any) -> None:
    """A request in the context of an earlier one counts, as with uvicorn."""

    async def inner() -> None:
        assert on_the_way() == 1

    async def outer() -> None:
        before = on_the_way()
        await submit()
        await ask(inner)
        assert (before, on_the_way()) == (1, 0)

    await ask(outer)
    assert on.counters["requests"] == 2


async def test_a_request_counts_from_the_end_of_its_body_on(on: Any) -> None:
    """A half-open body does not count, also where its client leaves, and a complete one does until its answer."""
    from starlette.requests import ClientDisconnect

    async def paused(times: int) -> None:
        assert (on.counters["requests"], on_the_way()) == (times, times)

    async def hears(*said: Any) -> None:
        messages = iter(said)

        async def receive() -> Any:
            await paused(0)
            return next(messages)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await _application(partial(paused, 1))(scope, receive, lambda _message: asyncio.sleep(0))

    part = {"type": "http.request", "body": b"{", "more_body": True}
    with pytest.raises(ClientDisconnect):
        await hears(part, part, {"type": "http.disconnect"})
    await hears(part, part, {"type": "http.request", "body": b"}"})
    assert (on.counters["requests"], on_the_way()) == (1, 0)


@pytest.mark.parametrize("fails", ["before", "in the submission", "after", "cancelled", "not at all"])
async def test_a_request_gives_back_what_it_counts(on: Any, fails: str) -> None:
    """It counts until its submission or its end, is subtracted once, and another incoming request still counts."""
    between, both = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        await between.wait()

    async def answer() -> str:
        assert on_the_way() == 2
        both.set()
        if fails == "before":
            raise ValueError
        if fails == "cancelled":
            await asyncio.sleep(60)
        await submit(refused=fails == "in the submission")
        assert on_the_way() == 1
        if fails == "after":
            raise ValueError
        return "Hello."

    other, asked = asyncio.create_task(ask(waits)), asyncio.create_task(ask(answer))
    await both.wait()
    if fails == "cancelled":
        asked.cancel()
    with pytest.raises((ValueError, asyncio.CancelledError)) if fails != "not at all" else nullcontext():
        await asked
    assert on_the_way() == 1
    assert on.counters["requests"] == 2
    between.set()
    await other
    assert on_the_way() == 0


@pytest.mark.parametrize(
    ("method", "path", "counts"),
    [
        ("POST", "/v1/audio/speech", 1),
        ("POST", "/behind/a/proxy/v1/completions", 1),
        ("POST", "/v1/images/generations", 0),
        ("GET", "/v1/chat/completions", 0),
    ],
)
async def test_requests_for_text_and_speech_count(on: Any, method: str, path: str, counts: int) -> None:
    """Requests of other routes and methods do not, and none without the option."""
    await ask(lambda: _counted(counts), path, method)
    on.options = on.patch.options(requests_first=False)
    await ask(lambda: _counted(0), path, method)
    assert on.counters["requests"] == counts


async def _counted(expected: int) -> None:
    assert on_the_way() == expected


async def test_a_request_that_waits_for_something_else_counts_no_more(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow client, a download or a paused engine does not delay outputs for longer than the limit."""
    monkeypatch.setattr(incoming, "LONGEST_WAY_S", 0.001)

    async def answer() -> None:
        await asyncio.sleep(0.1)
        assert on_the_way() == 0

    await ask(answer)


# ---- How long outputs wait ----


class _Time:
    """A clock that only sleeps advance, and a pause while one request is on its way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns, self.requests = 0, {"one"}
        monkeypatch.setattr(asyncio, "sleep", self._sleep)
        monkeypatch.setattr(incoming, "ON_THEIR_WAY", self.requests)
        self.pause = incoming.Pause(lambda: self.ns)
        self.ends = False

    async def _sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)
        if self.ends:
            self.requests.clear()


async def test_endless_requests_leave_outputs_two_thirds_of_the_time(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from one wait that is saved up at first; no wait is longer than its bound and a tick."""
    time = _Time(monkeypatch)
    longest = waited = 0
    while time.ns < 10_000_000_000:
        before = time.ns
        await time.pause.before_output()
        longest, waited = max(longest, time.ns - before), waited + time.ns - before
        time.ns += 70_000
    assert longest <= incoming.LONGEST_NS + incoming.TICK_S * 1e9
    assert 0.3 < (waited - incoming.LONGEST_NS) / time.ns <= 1 / 3
    assert on.counters["waits"] > 1000
    time.requests.clear()


async def test_a_wait_ends_with_the_submission(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends with the last incoming request."""
    time = _Time(monkeypatch)
    time.ends = True
    await time.pause.before_output()
    assert time.ns == 1_000_000


async def test_both_drains_wait(on: Any, event_driven: bool) -> None:
    """Both drains of upstream wait while a request is incoming, once a message, and hand out all in order."""
    incoming.ON_THEIR_WAY.add(object())  # type: ignore[arg-type]
    taken = await front_end_takes(100, event_driven=event_driven)
    incoming.ON_THEIR_WAY.clear()
    assert on.counters["waits"] > 0
    assert taken == list(range(100))


# ---- Whose application ----


@pytest.mark.parametrize("outer_is_upstreams", [False, True])
async def test_only_upstreams_application_is_acted_on(on: Any, outer_is_upstreams: bool) -> None:
    """A foreign one is passed through, also where one is mounted in the other; a server may name the arguments."""
    seen: list[bool] = []

    async def answer() -> None:
        seen.append(connection.follower("delivery") is not None)

    outer = _application(answer, is_upstreams=outer_is_upstreams)
    outer.mount("/inner", _application(answer, is_upstreams=not outer_is_upstreams))
    outer.router.routes.reverse()  # the mount before the route, which takes every path

    async def by_keywords(scope: Any, receive: Any, send: Any) -> None:
        await outer(scope=scope, receive=receive, send=send)

    assert [await ask(None, path, app=by_keywords) for path in (PATH, f"/inner{PATH}")] == [200, 200]
    assert (seen, on.has_failed) == ([outer_is_upstreams, True], False)


def test_a_patch_does_not_outlive_what_it_requires() -> None:
    """If connections are no longer followed, what requires that steps aside too, and nothing else."""
    with only("delivery", "admission_limit", "nonblocking_dequeue"):
        LEDGER.named("connections").fail("a test", ValueError())
        names = ("connections", "delivery", "admission_limit", "nonblocking_dequeue")
        assert [LEDGER.named(name).has_failed for name in names] == [True, False, True, False]


def test_upstream_marks_its_application() -> None:
    """By this attribute of its state, on every release."""
    server = importlib.import_module(API_SERVER)
    assert "openai_serving_models" in server.omni_init_app_state.__code__.co_names


def test_an_engine_without_an_api_server_leaves_applications_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where upstream's API server is not imported, the slot has FastAPI's own function."""
    from fastapi import FastAPI

    stock = vars(FastAPI)["__call__"]
    monkeypatch.delitem(sys.modules, API_SERVER, raising=False)
    with only("delivery"):
        assert vars(FastAPI)["__call__"] is stock
        assert "no API server" in LEDGER.named("connections").reason
