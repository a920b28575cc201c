"""Who is admitted, who is refused and in which words, and when a place is free again: on upstream's own routes."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER, AwaitedCall
from omni_fastpath.patches.admission_limit.places import Places, Ticket
from tests.patches.drive import only

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

LIMIT = 2
MESSAGE = {"role": "user", "content": "Hello."}
CHAT, ONE, BOTH = "/v1/chat/completions", {"messages": [MESSAGE]}, {"messages": [MESSAGE], "n": LIMIT}


# ---- The policy ----


def _opened(limit: int, requests: set[Any]) -> tuple[Places, dict[str, int]]:
    counters = dict.fromkeys(("admitted", "refused", "most_at_once"), 0)
    places = Places(counters)
    places.open(limit, requests)
    return places, counters


def test_places_are_taken_up_to_the_limit_and_given_back() -> None:
    """What is under way counts, and what is reserved; who is refused takes nothing; less than one place is one."""
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
    """An HTTP request asks once, whatever becomes of it; a web socket asks for each request, and keeps nothing."""
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
    """However long it keeps it; others' requests count, and so does one of that connection that begins afterwards."""
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


def test_who_wants_more_than_there_is_need_not_come_back() -> None:
    """It is refused on an idle server too, and told nothing of later."""
    places, _ = _opened(2, set())
    much, more = Ticket(), Ticket()
    assert not places.take(more, 3)
    assert places.take(Ticket(), 1)
    assert not places.take(much, 2)
    assert (more.may_retry, much.may_retry) == (False, True)


# ---- Upstream's routes ----


class Served:
    """Upstream's routes over an engine whose requests end when `go` is set."""

    def __init__(self) -> None:
        from fastapi import FastAPI
        from vllm.entrypoints.generate.base.serving import GenerateBaseServing
        from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
        from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
        from vllm_omni.entrypoints.async_omni import AsyncOmni
        from vllm_omni.entrypoints.openai import api_server, batch_serving, serving_chat, serving_speech

        served = self

        class Submission(AsyncOmniEngine):  # type: ignore[misc]
            def __init__(self) -> None:  # no super(): there are no stages
                pass

            def add_request(self, *_args: Any, **_kwargs: Any) -> None:
                """To no orchestrator."""

            def __del__(self) -> None:
                """Nothing to shut down."""

        class Engine(AsyncOmni):  # type: ignore[misc]
            errored, dead_error, final_output_task = False, SystemError(), "runs"

            def __init__(self) -> None:  # no super(): there are no stages
                self.request_states: dict[Any, None] = {}
                self.engine = Submission()

            def __del__(self) -> None:
                """Nothing to shut down."""

        class Chat(serving_chat.OmniOpenAIServingChat):  # type: ignore[misc]
            has_kv_connector = False

            def __init__(self) -> None:
                pass

            async def _create_chat_completion(self, *_args: Any) -> Any:
                served.rendered += 1
                if served.fails:
                    raise ValueError
                return served.answer()

        async def ask_as_vllm_does() -> None:
            GenerateBaseServing._preflight(self.speech, LIMIT)

        self.engine, self.rendered, self.fails = Engine(), 0, False
        self.began, self.go, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.numbers = itertools.count()
        self.speech = object.__new__(serving_speech.OmniOpenAIServingSpeech)
        self.speech.engine_client = self.engine
        self.app = FastAPI()
        self.app.include_router(api_server.router)
        self.app.add_api_route("/v1/made", ask_as_vllm_does, methods=["POST"])
        init_exception_handler(self.app)
        self.state = self.app.state
        self.state.args = SimpleNamespace(log_error_stack=False)
        self.state.openai_serving_chat, self.state.openai_serving_speech = Chat(), self.speech
        self.state.openai_serving_chat_batch = object.__new__(batch_serving.OmniOpenAIServingChatBatch)

    async def start(self, under_way: int = 0, limit: int | None = LIMIT, tokens: int | None = None) -> None:
        """What upstream does when its engine is there, with so many requests."""
        from omni_fastpath.patches.admission_limit import wrappers

        self.engine.request_states = dict.fromkeys(map(str, range(under_way)))
        arguments = SimpleNamespace(max_num_queued_reqs=limit, max_num_queued_tokens=tokens)
        given = (self.engine, self.state, arguments)
        await wrappers.wrapped_init_app_state(AwaitedCall(lambda *_: asyncio.sleep(0)), None, given, {})

    async def answer(self) -> AsyncIterator[str]:
        """As the engine's ``generate`` keeps its books."""
        me = f"request-{next(self.numbers)}"
        self.engine.request_states[me] = None
        await self.engine.engine.add_request_async(request_id=me, prompt="Hello.")
        self.began.set()
        try:
            await self.go.wait()
            for _ in range(3):
                yield "data: Hello.\n\n"
        finally:
            del self.engine.request_states[me]

    async def _serve(self, scope: dict[str, Any], *said: Any) -> list[Any]:
        """What the application answers to a client that says this, and stays until `left` is set."""
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
        """Status, headers and body of an answer; to bytes that may be no JSON too."""
        scope |= {"type": "http", "method": "POST", "path": path, "asgi": {"spec_version": "2.0"}}
        said = {"type": "http.request", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}
        begun, *rest = await self._serve(scope, said)
        return begun["status"], dict(begun["headers"]), b"".join(each["body"] for each in rest)

    async def talk(self, connect: Any, *messages: Any) -> list[Any]:
        """What a web socket of this endpoint is sent that says this."""
        connect.__annotations__["websocket"] = importlib.import_module("fastapi").WebSocket
        self.app.websocket("/made")(connect)
        said = [{"type": "websocket.receive", "text": json.dumps(message)} for message in messages]
        return await self._serve({"type": "websocket", "path": "/made"}, {"type": "websocket.connect"}, *said)


@pytest.fixture
def served() -> Iterator[Served]:
    """Upstream's routes with the patch alone."""
    importlib.import_module("vllm_omni.entrypoints.openai.api_server")  # without it these slots are left alone
    with only("admission_limit"):
        yield Served()


def _counters() -> tuple[int, ...]:
    """Admitted, refused, most at once."""
    return tuple(LEDGER.named("admission_limit").counters.values())


def _busy() -> Any:
    """What vLLM says."""
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
async def test_who_is_too_many_is_told_what_vllm_tells(served: Served, path: str, body: Any, under_way: int) -> None:
    """Its status, words and body, and when to come again; nothing was rendered, and no place is taken."""
    await served.start(under_way)
    status, headers, text = await served.ask(path, body)
    assert (status, json.loads(text), headers.get(b"retry-after")) == (503, _busy(), b"1")
    assert served.rendered == 0
    assert _counters() == (0, 1, 0)


@pytest.mark.parametrize("ends", ["answered", "left", "failed"])
async def test_an_answer_has_its_places_until_its_end(served: Served, ends: str) -> None:
    """However it ends, and those of its places too that the engine never counted."""
    await served.start()
    served.fails = ends == "failed"
    first = asyncio.create_task(served.ask(CHAT, BOTH))
    if ends != "failed":
        await asyncio.wait_for(served.began.wait(), 30)
        assert (await served.ask(CHAT, ONE))[0] == 503
        (served.go if ends == "answered" else served.left).set()
    status, headers, _ = await first
    assert (status, b"retry-after" in headers) == (500 if ends == "failed" else 200, False)
    assert not served.engine.request_states
    served.fails = False
    served.go.set()
    served.left.clear()
    assert (await served.ask(CHAT, BOTH))[0] == 200
    assert _counters() == (2, int(ends != "failed"), LIMIT)


async def test_a_middleware_that_raises_late_takes_no_place(served: Served) -> None:
    """In a stream's second message: upstream's generator, which nobody closes, keeps its request in the books."""

    class Raises:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            answers = itertools.count()

            async def passed_on(message: Any) -> None:
                if next(answers) == 2:
                    raise OSError("this message is not sent")
                await send(message)

            await self.app(scope, receive, passed_on)

    served.app.add_middleware(Raises)
    served.go.set()
    await served.start()
    kept = []
    answer = served.answer

    async def kept_alive() -> AsyncIterator[str]:
        kept.append(generator := answer())
        async for each in generator:
            yield each

    served.answer = kept_alive  # type: ignore[method-assign]
    for _ in range(3 * LIMIT):
        with pytest.raises(OSError, match="not sent"):
            await served.ask(CHAT, ONE)
    assert len(served.engine.request_states) == 3 * LIMIT
    assert _counters() == (3 * LIMIT, 0, 1)


NUMBERS: list[Any] = [0, -1, 2, 10**4000, True, False, None, "2", "\ud800", 1.5, [], {}]
SAID = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.sampled_from([[MESSAGE], [[MESSAGE], [MESSAGE]], [], "x", None]),
        "input": st.sampled_from(["Hello.", "", 3]),
        "items": st.sampled_from([[{"input": "Hello."}], [], [3]]),
        "n": st.sampled_from(NUMBERS) | st.integers() | st.text(),
        "stream": st.booleans(),
        "request_id": st.sampled_from(["../../a", "a\nb", 3]),
    },
)
SENT = st.binary(max_size=20) | SAID.map(json.dumps).map(str.encode) | st.just(b"[" * 100_000)
HEADERS = st.sampled_from([(b"content-type", b"text/plain"), (b"x-request-id", b"../\xff"), (b"content-length", b"x")])


def test_whatever_a_client_sends_is_answered_as_stock_answers(served: Served) -> None:
    """Where there are places; where there are none, or it is told that. No place is lost over it."""
    from omni_fastpath.patches.admission_limit import wrappers

    served.go.set()

    async def answered(path: str, body: bytes, headers: list[Any], under_way: int, limit: int | None) -> Any:
        wrappers.taken_off()  # of what it was told before
        await served.start(under_way, limit)
        try:
            status, _, text = await served.ask(path, body, headers=[(b"content-type", b"application/json"), *headers])
        except Exception as error:  # Starlette raises it again once it has answered
            return type(error)
        return status, text

    with asyncio.Runner() as runner:

        @given(
            st.sampled_from([CHAT, f"{CHAT}/batch", "/v1/audio/speech", "/v1/audio/speech/batch"]),
            SENT,
            st.lists(HEADERS),
        )
        def sends(path: str, body: bytes, headers: list[Any]) -> None:
            stock, free, full = (
                runner.run(answered(path, body, headers, *with_))
                for with_ in ((0, None), (0, 10**4500), (LIMIT, LIMIT))
            )
            assert free == stock
            assert full == stock or (full[0], json.loads(full[1])) == (503, _busy())
            assert wrappers._places._reserved == 0

        sends()


async def test_a_sentence_over_a_web_socket_asks(served: Served) -> None:
    """Before it is prepared, each for itself."""

    async def connect(websocket: Any) -> None:
        await websocket.accept()
        for _ in range(2):
            try:
                await served.speech._prepare_speech_generation(None)
            except Exception as error:
                await websocket.send_text(type(error).__name__)
            served.engine.request_states.clear()

    await served.start(LIMIT)
    served.engine.errored = True
    _, *texts = await served.talk(connect)
    assert [each.get("text") for each in texts[:2]] == ["QueueOverflowError", "SystemError"]
    assert _counters() == (1, 1, 1)


async def test_without_the_flag_nobody_is_asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state says so; of the flag for tokens it is said that it limits nothing, of several servers what it means."""
    from omni_fastpath.patches.admission_limit import wrappers

    said: list[str] = []
    monkeypatch.setattr(wrappers, "warn_once", said.append)
    served.go.set()
    await served.start(100, limit=None, tokens=7)
    entry = LEDGER.named("admission_limit")
    assert entry.state is State.NOT_APPLICABLE
    assert "--max-num-queued-reqs" in entry.reason
    assert (await served.ask(CHAT, ONE))[0] == 200
    assert _counters() == (0, 0, 0)
    served.state.api_server_count = 2
    await served.start(limit=8)
    assert [("tokens has no effect" in line, "up to 16" in line) for line in said] == [(True, False), (False, True)]
