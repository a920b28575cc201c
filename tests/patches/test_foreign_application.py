"""Applications in the process of an engine: only the one of upstream's API server is acted on."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from omni_fastpath import connection
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.connections import API_SERVER
from tests.patches.drive import front_end_takes, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

PATH = "/v1/chat/completions"


@pytest.fixture(params=["delivery", "admission_limit", "queue_metrics"])
def known(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of the patches that wrap the application, and what tells in a handler whether it acts on the request."""
    importlib.import_module(API_SERVER)  # without it the application is left alone
    with only(request.param):
        wrappers = importlib.import_module(LEDGER.named(request.param).patch.wrappers)
        if request.param == "admission_limit":
            wrappers._places.open(1)
        yield lambda: connection.follower(request.param)
        assert not LEDGER.named(request.param).has_failed


def _application(known: Any, *, is_upstreams: bool) -> tuple[Any, list[bool]]:
    """An application, and whether each of its requests was acted on."""
    from fastapi import FastAPI

    app, seen = FastAPI(), []
    app.add_api_route(PATH, lambda: seen.append(known() is not None), methods=["POST"])
    if is_upstreams:
        app.state.openai_serving_models = None
    return app, seen


async def _ask(app: Any, path: str) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return (await client.post(path)).status_code


def test_uvicorn_finds_an_application_and_no_factory(known: Any) -> None:
    """Called without arguments, as uvicorn does, an application raises at once, and it is served as ASGI 3."""
    import uvicorn

    for is_upstreams in (False, True):
        app, _ = _application(known, is_upstreams=is_upstreams)
        config = uvicorn.Config(app)
        config.load()
        assert config.interface == "asgi3"


@pytest.mark.parametrize("outer_is_upstreams", [False, True])
async def test_only_upstreams_application_is_acted_on(known: Any, outer_is_upstreams: bool) -> None:
    """A foreign one is passed through, also where one of the two is mounted in the other."""
    outer, seen_outside = _application(known, is_upstreams=outer_is_upstreams)
    inner, seen_inside = _application(known, is_upstreams=not outer_is_upstreams)
    outer.mount("/inner", inner)
    assert [await _ask(outer, path) for path in (PATH, f"/inner{PATH}")] == [200, 200]
    assert (seen_outside, seen_inside) == ([outer_is_upstreams], [True])


async def test_an_application_may_be_called_by_keywords(known: Any) -> None:
    """A server may name the arguments."""
    app, seen = _application(known, is_upstreams=True)
    assert await _ask(lambda scope, receive, send: app(scope=scope, receive=receive, send=send), PATH) == 200
    assert seen == [True]


def test_a_patch_does_not_outlive_what_it_requires() -> None:
    """If connections are no longer followed, what would wait for their end steps aside too, and nothing else."""
    with only("delivery", "admission_limit", "nonblocking_dequeue"):
        LEDGER.named("connections").fail("a test", ValueError())
        names = ("connections", "delivery", "admission_limit", "nonblocking_dequeue")
        assert [LEDGER.named(name).has_failed for name in names] == [True, True, True, False]


def test_upstream_marks_its_application() -> None:
    """By this attribute of its state, on every release."""
    server = importlib.import_module(API_SERVER)
    assert "openai_serving_models" in server.omni_init_app_state.__code__.co_names


def test_an_engine_without_an_api_server_leaves_applications_alone(
    monkeypatch: pytest.MonkeyPatch, event_driven: bool
) -> None:
    """Where upstream's API server is not imported, the slot has FastAPI's own function, and messages are delivered."""
    import sys

    from fastapi import FastAPI

    stock = vars(FastAPI)["__call__"]
    monkeypatch.delitem(sys.modules, API_SERVER, raising=False)
    with only("delivery", "queue_metrics"):
        assert vars(FastAPI)["__call__"] is stock
        assert "no API server" in LEDGER.named("connections").reason
        assert asyncio.run(front_end_takes(20, event_driven=event_driven, later=3)) == list(range(23))
        assert LEDGER.named("delivery").counters["messages"] == 23
