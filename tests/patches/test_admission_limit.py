"""Which requests are admitted, how refused ones are answered, and when a place is free again, on upstream's routes."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import CancelScope

from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.admission_limit.places import Places, RetryAfter, Ticket
from tests.fakes.upstream import load
from tests.patches.drive import engine_without_stages, only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

LIMIT = 2
MESSAGE = {"role": "user", "content": "Hello."}
CHAT, ONE, BOTH = "/v1/chat/completions", {"messages": [MESSAGE]}, {"messages": [MESSAGE], "n": LIMIT}


# ---- The policy ----


def _opened(limit: int, requests: set[Any], told: RetryAfter | None = None) -> tuple[Places, dict[str, int]]:
    counters = dict.fromkeys(("admitted", "refused", "most_at_once"), 0)
    places = Places(counters, told)
    places.open(limit, requests)
    return places, counters


def test_places_are_taken_up_to_the_limit_and_given_back() -> None:
    """Unfinished requests and reservations count, a refused request takes nothing, and at least one place is taken."""
    requests = {"one"}
    places, counters = _opened(4, requests)
    first = Ticket()
    assert places.take(first, 3)
    assert not places.take(Ticket(), 1)
    requests.clear()
    assert places.take(Ticket(), -5)
    assert not places.take(Ticket(), 1)
    for _ in range(2):
        places.give_back(first)
    assert not places.take(Ticket(), 4)
    assert places.take(Ticket(), 3)
    assert counters == {"admitted": 3, "refused": 3, "most_at_once": 4}


def test_a_reserved_place_goes_over_to_the_engine_once() -> None:
    """An HTTP request is checked once; a web socket is checked for each request and reserves nothing."""
    requests: set[Any] = set()
    places, counters = _opened(2, requests)
    once, socket = Ticket(), Ticket(is_socket=True)
    for _ in range(3):
        assert places.take(once, 1)
        assert places.take(socket, 1)
    requests |= {"once", "socket"}
    for _ in range(2):
        places.hand_over(once, "once")
    places.hand_over(socket, "socket")
    assert places.take(once, 1)
    assert not places.take(socket, 1)
    requests.remove("once")
    assert places.take(socket, 1)
    assert counters == {"admitted": 5, "refused": 1, "most_at_once": 2}


@pytest.mark.parametrize("is_socket", [False, True])
def test_what_the_engine_keeps_of_an_ended_connection_counts_no_more(is_socket: bool) -> None:
    """Requests of other connections still count, and so does a later request of the same connection."""
    requests: set[Any] = set()
    places, _ = _opened(2, requests)
    ended, other = Ticket(is_socket=is_socket), Ticket()
    for ticket, name in ((ended, "leaked"), (other, "other")):
        assert places.take(ticket, 1)
        requests.add(name)
        places.hand_over(ticket, name)
    assert not places.take(Ticket(), 1)
    places.give_back(ended)
    assert not places.take(Ticket(), 2)
    free = Ticket()
    assert places.take(free, 1)
    places.give_back(free)
    requests.add("later")
    places.hand_over(ended, "later")
    assert not places.take(Ticket(), 1)
    requests.clear()
    assert places.take(Ticket(), 2)


def test_requests_that_are_never_checked_leave_nothing() -> None:
    """A server whose routes check none keeps no id that the engine has forgotten."""
    requests: set[Any] = set()
    places, _ = _opened(2, requests)
    for name in ("one", "two"):
        ticket = Ticket()
        requests.add(name)
        places.hand_over(ticket, name)
        requests.clear()
        places.give_back(ticket)
    assert not places._left


def test_more_places_than_the_limit_are_refused_for_good() -> None:
    """A request for more places than the limit is refused without a Retry-After header, even by an idle server."""
    places, _ = _opened(2, set())
    much, more = Ticket(), Ticket()
    assert not places.take(more, 3)
    assert places.take(Ticket(), 1)
    assert not places.take(much, 2)
    assert (more.retry_after_s, much.retry_after_s > 0) == (0, True)


def test_refused_clients_are_told_when_places_will_be_free() -> None:
    """One after the other by the mean time of an answer; spread; 1 to 30 s; the past and later answers count."""
    now, factors = [100.0], iter([1.0] * 5 + [0.5, 1.5] + [1.0] * 100)
    told = RetryAfter(lambda: now[0], lambda *_: next(factors))
    for _ in range(200):
        told.ended(now[0] - 3.9)  # with four places about one is free each second
    assert [told.seconds(1, 4) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert [told.seconds(1, 4), told.seconds(1, 4)] == [3, 11]
    assert told.seconds(4, 4) == 11
    now[0] += 50
    assert told.seconds(1, 4) == 1
    assert [told.seconds(4, 4) for _ in range(20)][-1] == 30


def test_an_answer_that_ended_counts_once_for_the_next_refusal() -> None:
    """From its places until they are given back."""
    now, ticket = [0.0], Ticket()
    told = RetryAfter(lambda: now[0], lambda *_: 1.0)
    places, _ = _opened(1, set(), told)
    assert places.take(ticket, 1)
    now[0] = 24.0
    for _ in range(2):
        places.give_back(ticket)
    assert told.seconds(1, 1) == 9  # 8 s, and a sixteenth of 16 s more


# ---- Upstream's routes ----


class Served:
    """Upstream's routes over an engine whose requests end when `go` is set."""

    def __init__(self) -> None:
        from fastapi import FastAPI
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
        from vllm_omni.entrypoints.async_omni import AsyncOmni
        from vllm_omni.entrypoints.openai import api_server, batch_serving, serving_chat, serving_speech

        served = self

        engine = {"errored": False, "dead_error": SystemError(), "final_output_task": "runs", "request_states": {}}
        engine |= {"__init__": lambda _self: None, "__del__": lambda _self: None, "engine": engine_without_stages()}

        class Chat(serving_chat.OmniOpenAIServingChat):  # type: ignore[misc]
            has_kv_connector = False

            async def _create_chat_completion(self, *_args: Any) -> Any:
                served.rendered += 1
                return served.answer()

        async def ask_as_vllm_does() -> None:
            GenerateBaseServing._preflight(self.speech, LIMIT)

        self.engine, self.rendered = type("Engine", (AsyncOmni,), engine)(), 0
        self.began, self.go, self.left, self.forgets = (asyncio.Event() for _ in range(4))
        self.forgets.set()
        self.numbers = itertools.count()
        self.speech = object.__new__(serving_speech.OmniOpenAIServingSpeech)
        self.speech.engine_client = self.engine
        self.app = FastAPI()
        self.app.include_router(api_server.router)
        self.app.add_api_route("/v1/made", ask_as_vllm_does, methods=["POST"])
        init_exception_handler(self.app)
        self.state = self.app.state
        self.state.openai_serving_models = None
        self.state.args = SimpleNamespace(log_error_stack=False)
        self.state.openai_serving_chat, self.state.openai_serving_speech = object.__new__(Chat), self.speech
        self.state.openai_serving_chat_batch = object.__new__(batch_serving.OmniOpenAIServingChatBatch)

    async def start(self, under_way: int = 0, limit: int | None = LIMIT, tokens: int | None = None) -> None:
        """Do what upstream does when its engine has started, with so many unfinished requests."""
        from omni_fastpath.patches.admission_limit import wrappers

        self.engine.request_states = dict.fromkeys(map(str, range(under_way)))
        wrappers.step_aside()  # of what it was told before
        flags = {"max_num_queued_reqs": limit, "max_num_queued_tokens": tokens, "log_error_stack": False}
        self.state.args, self.state.engine_client = SimpleNamespace(**flags), self.engine

    async def answer(self) -> AsyncIterator[str]:
        """Record and forget a request as the engine's ``generate`` does."""
        me = f"request-{next(self.numbers)}"
        self.engine.request_states[me] = None
        await self.engine.engine.add_request_async(request_id=me, prompt="Hello.")
        self.began.set()
        try:
            await self.go.wait()
            for _ in range(3):
                yield "data: Hello.\n\n"
        finally:
            with CancelScope(shield=True):
                await self.forgets.wait()
            del self.engine.request_states[me]

    async def _serve(self, scope: dict[str, Any], *said: Any) -> list[Any]:
        """What the application sends to a client that sends this and stays until `left` is set."""
        to_say, answers = list(said), []
        base = {"query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")]}

        async def receive() -> Any:
            if to_say:
                return to_say.pop(0)
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            answers.append(message)

        await asyncio.wait_for(self.app({**base, **scope}, receive, send), 30)
        return answers

    async def ask(self, path: str, body: Any, **scope: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and body of the answer to a body, which is sent as it is if it is bytes."""
        scope |= {"type": "http", "method": "POST", "path": path, "asgi": {"spec_version": "2.0"}}
        said = {"type": "http.request", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}
        begun, *rest = await self._serve(scope, said)
        return begun["status"], dict(begun["headers"]), b"".join(each["body"] for each in rest)

    async def speak(self, sentences: int = 1) -> list[Any]:
        """What a web socket receives for so many sentences; the engine forgets each one after its preparation."""

        async def connect(websocket: Any) -> None:
            await websocket.accept()
            for _ in range(sentences):
                try:
                    await self.speech._prepare_speech_generation(None)
                except Exception as error:
                    await websocket.send_text(type(error).__name__)
                self.engine.request_states.clear()

        self.app.router.add_websocket_route("/made", connect)
        self.engine.errored = True
        _, *sent = await self._serve({"type": "websocket", "path": "/made"}, {"type": "websocket.connect"})
        self.engine.errored = False
        return [each.get("text") for each in sent[:sentences]]


@pytest.fixture
def served() -> Iterator[Served]:
    """Upstream's routes with the patch alone."""
    import vllm_omni.entrypoints.openai.api_server  # noqa: F401 - without it these slots are left alone

    with only("admission_limit"):
        yield Served()


def _counters() -> tuple[int, ...]:
    """Admitted, refused, most at once."""
    return tuple(LEDGER.named("admission_limit").counters.values())


def busy() -> Any:
    """The body of vLLM's refusal."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import QueueOverflowError

    return create_error_response(QueueOverflowError()).model_dump()


@pytest.mark.parametrize(
    ("path", "body", "under_way"),
    [
        (CHAT, {**ONE, "stream": True}, 2),
        (CHAT, BOTH, 1),
        (f"{CHAT}/batch", {"messages": [[MESSAGE], [MESSAGE]]}, 1),
        ("/v1/audio/speech", {"input": "Hello."}, 2),
        ("/v1/audio/speech/batch", {"items": [{"input": "Hello."}, {"input": "Hello."}]}, 1),
        ("/v1/made", {}, 1),
    ],
)
async def test_a_full_server_answers_as_vllm_does(served: Served, path: str, body: Any, under_way: int) -> None:
    """The 503 has vLLM's body and a Retry-After header; no prompt is rendered, and no place is taken."""
    await served.start(under_way)
    status, headers, text = await served.ask(path, body)
    assert (status, json.loads(text)) == (503, busy())
    assert 1 <= int(headers[b"retry-after"]) <= 30
    assert served.rendered == 0
    assert _counters() == (0, 1, 0)


async def test_a_client_that_left_has_no_places(served: Served) -> None:
    """They are free at its disconnect, before its application ends, and are given back once; others' at their end."""
    await served.start(limit=1)
    served.forgets.clear()
    first = asyncio.create_task(served.ask(CHAT, {**ONE, "stream": True}))
    await asyncio.wait_for(served.began.wait(), 30)
    assert (await served.ask(CHAT, ONE))[0] == 503
    served.left.set()
    await asyncio.sleep(0)
    served.left.clear()
    served.began.clear()
    second = asyncio.create_task(served.ask(CHAT, ONE))  # the interrupted user asks again
    await asyncio.wait_for(served.began.wait(), 30)
    assert not first.done()
    served.forgets.set()
    await first
    assert (await served.ask(CHAT, ONE))[0] == 503
    served.go.set()
    assert (await second)[0] == 200
    assert (await served.ask(CHAT, ONE))[0] == 200
    assert _counters()[:2] == (3, 2)


async def test_a_sentence_over_a_web_socket_asks(served: Served) -> None:
    """Each sentence is checked before it is prepared."""
    await served.start(LIMIT)
    assert await served.speak(2) == ["QueueOverflowError", "SystemError"]
    assert _counters() == (1, 1, 1)


async def test_without_the_flag_no_request_is_checked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state says so; a limit on tokens causes a warning."""
    from omni_fastpath.patches.admission_limit import wrappers

    said: list[str] = []
    monkeypatch.setattr(wrappers, "warn_once", said.append)
    served.go.set()
    await served.start(100, limit=None, tokens=7)
    await served._serve({"type": "lifespan"}, {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})
    entry = LEDGER.named("admission_limit")
    assert entry.state is State.NOT_APPLICABLE
    assert "--max-num-queued-reqs" in entry.reason
    assert (await served.ask(CHAT, ONE))[0] == 200
    assert _counters() == (0, 0, 0)
    assert ["tokens has no effect" in line for line in said] == [True]
    wrappers._places.open(1)  # what an application before it was started with
    wrappers._open(SimpleNamespace())
    assert wrappers._places.limit is None


async def test_a_handler_that_raises_gives_its_places_back(served: Served) -> None:
    """A connection whose application raises has no places any more."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    async def raises() -> None:
        GenerateBaseServing._preflight(served.speech, LIMIT)
        raise OSError("a handler's")

    served.app.add_api_route("/v1/raises", raises, methods=["POST"])
    await served.start()
    for _ in range(2):
        with pytest.raises(OSError, match="a handler's"):
            await served.ask("/v1/raises", {})
    assert _counters() == (2, 0, LIMIT)


async def test_the_limit_holds_whatever_copy_made_the_application(served: Served, tmp_path: Path) -> None:
    """Also where a second copy of the API server's module runs, and no function of the first one is called."""
    from vllm_omni.entrypoints.openai import api_server

    copy: Any = load(tmp_path, inspect.getsource(api_server), "__main__copy")
    served.app.router.routes[:] = [each for each in served.app.router.routes if getattr(each, "path", "") == "/v1/made"]
    served.app.include_router(copy.router)
    await served.start(LIMIT)
    assert (await served.ask(CHAT, ONE))[0] == 503
