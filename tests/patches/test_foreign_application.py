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


@pytest.fixture
def seen() -> Iterator[list[bool]]:
    """With a patch that follows connections installed; filled by each handler: whether its request is followed."""
    importlib.import_module(API_SERVER)  # without it the application is left alone
    with only("delivery") as entry:
        yield []
        assert not entry.has_failed


def _application(seen: list[bool], *, is_upstreams: bool) -> Any:
    """An application that notes whether its request is followed."""
    from fastapi import FastAPI

    app = FastAPI()
    app.add_api_route(PATH, lambda: seen.append(connection.follower("delivery") is not None), methods=["POST"])
    if is_upstreams:
        app.state.openai_serving_models = None
    return app


async def _ask(app: Any, path: str) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return (await client.post(path)).status_code


def test_uvicorn_finds_an_application_and_no_factory(seen: list[bool]) -> None:
    """Called without arguments, as uvicorn does, an application raises at once, and it is served as ASGI 3."""
    import uvicorn

    config = uvicorn.Config(_application(seen, is_upstreams=True))
    config.load()
    assert config.interface == "asgi3"


@pytest.mark.parametrize("outer_is_upstreams", [False, True])
async def test_only_upstreams_application_is_acted_on(seen: list[bool], outer_is_upstreams: bool) -> None:
    """A foreign one is passed through, also where one is mounted in the other; a server may name the arguments."""
    outer = _application(seen, is_upstreams=outer_is_upstreams)
    outer.mount("/inner", _application(seen, is_upstreams=not outer_is_upstreams))

    async def by_keywords(scope: Any, receive: Any, send: Any) -> None:
        await outer(scope=scope, receive=receive, send=send)

    assert [await _ask(by_keywords, path) for path in (PATH, f"/inner{PATH}")] == [200, 200]
    assert seen == [outer_is_upstreams, True]


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
