"""The metrics of a request's first output, of requests without output, and of shared memory."""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from types import MethodType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("vllm_omni")

from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, front_end, silent, text, without_orchestrator
from omni_fastpath import guard
from omni_fastpath.install import is_installed
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.queue_metrics import account, wrappers
from omni_fastpath.patches.queue_metrics.first_output import unread_s
from tests.patches.content import sequences
from tests.patches.drive import only, stages
from tests.patches.test_queue_metrics import CODE2WAV, TALKER, THINKER, counts, shown

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

LEGS = ("way_in", "engines", "queue", "dispatch", "hand_over", "writing")
SCOPE = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
API_SERVER = SimpleNamespace(openai_serving_models=None)
"""The state of upstream's application."""
STREAMED: list[tuple[bytes, bytes]] = [(b"content-type", b"text/event-stream")]
WHOLE = [*STREAMED, (b"content-length", b"9")]


async def _nothing(*_: Any) -> None:
    """In the place of a function of upstream."""


def guarded(name: str, patch: str = "queue_metrics") -> Any:
    """A wrapper as it is installed, or the wrapped function if the patch is off."""
    if not is_installed(patch):
        return lambda wrapped, _instance, args, kwargs: wrapped(*args, **kwargs)
    module = importlib.import_module(LEDGER.named(patch).patch.wrappers)
    return guard.guard_wrapper(LEDGER.named(patch), getattr(module, name), name, lambda *_: True)


def answered(*, event_driven: bool = False, headers: list[tuple[bytes, bytes]] = STREAMED, takes: int = 3) -> list[Any]:
    """What upstream's front end hands to a request that the application makes: a first text, then two audios.

    Real are the orchestrator, the front end, the request's state and its queue; the application is ours.
    """
    from vllm_omni.entrypoints.client_request_state import ClientRequestState

    pipeline, taken = Pipeline(stages(1), event_driven=event_driven), []
    pipeline.add_request("one")
    for pool in pipeline.pools:
        if pool.stage_id == THINKER:  # the rig's requests are not detokenized
            pool._has_non_empty_output = lambda output: bool(output.outputs[0].token_ids)

    async def serve(_scope: Any, _receive: Any, send: Any) -> None:
        state = ClientRequestState("one")
        found = front_end(pipeline, {"one": state.queue}, event_driven=event_driven)
        found.request_states["one"] = state
        found._final_output_handler()

        async def submit() -> None:
            [pool, *_] = pipeline.pools
            request = SimpleNamespace(request_id="one")
            await guarded("wrapped_submit_initial")(_nothing, pool, ("one", None, request), {})

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(submit(), pipeline._loop))  # type: ignore[arg-type]
        pipeline.put(THINKER, batch(text("one", 5)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index in range(takes):
            taken.append(await asyncio.wait_for(state.queue.get(), 30))
            if index == 0:  # not before, or a first audio could be ahead of the text
                pipeline.put(CODE2WAV, batch(silent("one")), batch(audio("one", 1.0)), batch(audio("one", 2.0)))
            await send({"type": "http.response.body", "body": b"a packet", "more_body": True})
        found.final_output_task.cancel()
        await asyncio.gather(found.final_output_task, return_exceptions=True)

    async def send(_message: Any) -> None:
        await asyncio.sleep(0)

    async def application() -> None:
        await guarded("wrapped_app", "connections")(serve, SimpleNamespace(state=API_SERVER), (SCOPE, None, send), {})

    with pipeline:
        asyncio.run(application())
    return taken


def _content(messages: list[Any]) -> list[tuple[int, Any]]:
    """The messages of each stage in order; how two stages interleave is a matter of time."""
    found = [(each.stage_id, sequences([each])) for each in messages]
    return sorted(found, key=lambda each: each[0])


# ---- Legs ----


@every_release
def test_the_legs_of_a_first_output_make_its_whole_time(event_driven: bool) -> None:
    """Each leg is observed once for first text and first audio; all but the engines' leg is the API process's part."""
    with only("queue_metrics"):
        assert len(answered(event_driven=event_driven)) == 3
        for output in ("text", "audio"):
            assert {leg: counts("first_output_leg_seconds")[output, leg] for leg in LEGS} == dict.fromkeys(LEGS, 1)
            legs = {leg: shown("first_output_leg_seconds")[output, leg]["sum"] for leg in LEGS}
            assert min(legs.values()) >= 0
            assert shown("first_output_seconds")[output,]["sum"] == pytest.approx(sum(legs.values()))
            api_process = shown("first_output_api_process_seconds")[output,]["sum"]
            assert api_process == pytest.approx(sum(legs.values()) - legs["engines"])
            assert [counts("first_output_ahead")[output, queue] for queue in ("replica", "front_end")] == [1, 1]
            assert shown("first_output_ahead")[output, "replica"]["sum"] == (output == "audio")


@pytest.mark.parametrize(("headers", "takes"), [(WHOLE, 3), (STREAMED, 0)], ids=["in one piece", "client leaves"])
def test_an_answer_that_cannot_be_followed_is_not_counted(headers: Any, takes: int) -> None:
    """None of its legs is observed, and nothing of it is kept."""
    with only("queue_metrics"):
        answered(headers=headers, takes=takes)
        assert set(counts("first_output_seconds").items()) == {(("text",), 0), (("audio",), 0)}
        assert set(counts("first_output_leg_seconds").values()) == {0}
        assert wrappers._journeys == {}


# ---- Requests without an output ----


def waiting(now_s: float) -> Any:
    """A pipeline with a request on the second of two replicas, which was submitted 40 seconds ago."""
    pipeline = Pipeline(stages(2))
    state = pipeline.add_request("one", replicas=(1, 1, 1))
    state.stage_submit_ts = dict.fromkeys(state.stage_submit_ts, now_s - 40.0)
    return pipeline


def quiet(metric: str = "requests_without_output") -> dict[tuple[str, ...], float]:
    """The replicas at which a metric is not zero."""
    return {labels: each["value"] for labels, each in shown(metric).items() if each["value"]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the account, which only the test moves: a busy machine may hold a test up for half a minute."""
    found = SimpleNamespace(now_s=time.time())
    for name in ("monotonic", "time"):
        monkeypatch.setattr(account, name, lambda: found.now_s)
    return found


@every_release
def test_a_request_without_output_waits_for_its_first_unfinished_stage(event_driven: bool, clock: Any) -> None:
    """It counts at the replica of that stage, from its last output at any stage or its submission on."""
    with only("queue_metrics"):
        pipeline = waiting(clock.now_s)
        pipeline.orchestrator._event_driven_orch = event_driven
        with pipeline:
            pipeline.settle()
            assert quiet() == {("0", "1"): 1}
            assert set(shown("requests_without_output")) == {(str(n), str(at)) for n in range(3) for at in range(2)}
            [longest] = quiet("longest_without_output_seconds").values()
            assert longest == pytest.approx(40.0)
            pipeline.do(pipeline.pools[THINKER].output_processor.request_states.clear)
            assert quiet() == {("1", "1"): 1}
            pipeline.put(TALKER, batch(codes("one")), replica_id=1)
            pipeline.settle()
            assert quiet() == {}
            pipeline.orchestrator.request_states.clear()
            assert quiet("longest_without_output_seconds") == {}


def test_which_requests_wait_for_an_output(clock: Any) -> None:
    """A session that waits for its client does not, and neither does a request at a diffusion stage."""
    with only("queue_metrics"):
        pipeline = waiting(clock.now_s)
        found = account.Account(pipeline.orchestrator, {}, {})
        wrappers._accounts.append(ref(found))
        segments = pipeline.orchestrator.request_states["one"].streaming.segments
        # Between two segments, in one, and after new input.
        for finished, answered_s, waits in ((True, 35.0, False), (False, 35.0, True), (True, 50.0, True)):
            segments[THINKER] = SimpleNamespace(finished=finished)
            found._output_s["one"] = clock.now_s - answered_s
            assert quiet() == ({("0", "1"): 1} if waits else {})
        pipeline.pools[THINKER].__class__ = type("Diffusion", (type(pipeline.pools[0]),), {"stage_type": "diffusion"})
        assert quiet() == {}


def test_a_request_that_the_event_loop_did_not_read_at_once_has_begun_before() -> None:
    """The time that a request was unread in a TCP socket counts; of any other connection none does."""
    with only("queue_metrics"):
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
            client.sendall(b"a request")
            time.sleep(0.1)
            transport = SimpleNamespace(get_extra_info=lambda _name: server)
            cycle: Any = SimpleNamespace(transport=transport)
            receive = MethodType(lambda _self: None, cycle)
            assert unread_s(receive) > 0
            assert server.recv(9) == b"a request"
        here, there = socket.socketpair()
        with here, there:
            transport.get_extra_info = lambda _name: here
            assert unread_s(receive) == 0.0
        assert unread_s(lambda: None) == 0.0


@every_release
def test_a_paused_engine_is_not_a_stalled_one(clock: Any) -> None:
    """Upstream's pause of this engine, not of another one, ends the waiting of its requests, which begins anew."""

    async def paused(found: Any) -> None:
        found._final_output_handler()
        found._pause_cond, found._paused_stage_ids = asyncio.Condition(), set()
        found._split_stage_ids_by_type = lambda _ids: ([], [])
        await found.pause_generation(mode="keep", clear_cache=False)
        found.final_output_task.cancel()

    with only("queue_metrics"), waiting(clock.now_s) as pipeline:
        pipeline.settle()
        other, found = (front_end(each, {}, event_driven=False) for each in (without_orchestrator(), pipeline))
        asyncio.run(paused(other))
        assert quiet() == {("0", "1"): 1}
        asyncio.run(paused(found))
        assert quiet() == {}
        clock.now_s += 100.0
        assert quiet("longest_without_output_seconds") == {}
        found._pause_cond = asyncio.Condition()  # of the next event loop
        asyncio.run(found.resume_generation())
        clock.now_s += 29.0
        assert quiet() == {}
        assert quiet("longest_without_output_seconds") == {("0", "1"): pytest.approx(29.0)}
        clock.now_s += 1.0
        assert quiet() == {("0", "1"): 1}
