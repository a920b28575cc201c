"""A request that cannot be submitted fails alone, on the real orchestrator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm_omni")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.messages import AddCompanionRequestMessage
from zmq.error import ZMQError

from benchmarks.rigs.inprocess import QWEN3_OMNI, engine_request
from omni_fastpath.declare import State
from tests.patches.drive import only, silent
from tests.schedules.drain_world import Shape, World

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

SURROGATE = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
"""What msgpack raises where a text has a lone surrogate in it."""


def begun(*, event_driven: bool, async_chunk: bool = True) -> World:
    """An orchestrator with thinker, talker and code2wav, in which ``good`` was submitted."""
    made = World(Shape(QWEN3_OMNI, async_chunk), event_driven=event_driven)
    submit(made, "good")
    return made


def submit(world: World, name: str, segment: str = "") -> None:
    """Submit a request that wants text and audio, and let the orchestrator read it."""
    world.submit(name, "DELTA", (0, 2), segment)
    world.advance(0.01)


@pytest.fixture
def world(event_driven: bool) -> Iterator[World]:
    """A world that has begun."""
    made = begun(event_driven=event_driven)
    yield made
    made.close()


def refuse(world: World, stage: int, error: Exception, name: str = "bad") -> None:
    """Let a stage's client raise when it is given this request."""
    [engine] = world.engines[stage]
    add = engine.add_request_async

    async def add_request_async(request: Any, **kwargs: Any) -> None:
        if request.request_id == name:
            raise error
        await add(request, **kwargs)

    engine.__dict__["add_request_async"] = add_request_async


def serves(world: World, name: str) -> bool:
    """Whether this request ends as it should: its text and audio arrive, and one message is its last."""
    for stage, kind in ((0, "text"), (1, "codes"), (2, "audio")):
        world.send(stage, [(name, kind, 7, "stop")])
        world.advance(0.01)
    got = world.got[name]
    return not got.errors and {0, 2} <= got.stages.keys() and got.ends == 1 and got.last_is_end


@pytest.mark.parametrize("stage", [0, 2], ids=["its own submission", "what is announced to a later stage"])
def test_a_request_fails_alone(world: World, stage: int) -> None:
    """One error for its client, nothing of it is kept, its stages drop it, and others are served."""
    refuse(world, stage, SURROGATE)
    with only("submission_errors") as on:
        submit(world, "bad")
        assert on.counters["failed_alone"] == 1
    words = "The request could not be submitted: UnicodeEncodeError: "
    [(fatal, at, said, *status)] = world.got["bad"].errors
    assert (fatal, at, said) == (False, stage, f"{words}{SURROGATE}")
    assert status[:2] == [400, "BadRequestError"]
    assert {name for _, name in world.left()} == {"good"}
    assert [engine.aborted for [engine] in world.engines[:stage]] == [["bad"]] * stage
    assert serves(world, "good")
    submit(world, "next")
    assert serves(world, "next")


@pytest.mark.parametrize("drain", [(), ("nonblocking_dequeue", "budgeted_drain")], ids=["upstream's loop", "the drain"])
def test_a_request_that_cannot_be_forwarded_fails_alone(event_driven: bool, drain: tuple[str, ...]) -> None:
    """Without async_chunk a later stage gets it with an output of the one before; what that raises ends no other."""
    with (
        only(*drain, "submission_errors") as patch,
        contextlib.closing(begun(event_driven=event_driven, async_chunk=False)) as world,
    ):
        submit(world, "bad")
        refuse(world, 1, ValueError("no such voice"))
        world.send(0, [("bad", "text", 7, "stop")])
        world.advance(0.01)
        assert patch.counters["failed_alone"] == 1
        [(fatal, at, said, *_)] = world.got["bad"].errors
        assert (fatal, at, said) == (False, 1, "The request could not be submitted: ValueError: no such voice")
        assert {name for _, name in world.left()} == {"good"}
        assert serves(world, "good")


def test_what_is_raised_around_a_submission_fails_it_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a message does more than submit, and may raise there too."""
    monkeypatch.setattr(world.orchestrator, "_register_running_request", Mock(side_effect=ValueError("no such role")))
    with only("submission_errors"):
        submit(world, "bad")
    [(fatal, at, said, *_)] = world.got["bad"].errors
    assert (fatal, at, said) == (False, 0, "The request could not be submitted: ValueError: no such role")
    assert {name for _, name in world.left()} == {"good"}
    assert serves(world, "good")


def test_a_failure_that_cannot_be_told_ends_the_orchestrator(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the patch: no client waits for an answer that nobody will send."""
    refuse(world, 0, SURROGATE)
    with only("submission_errors") as patch, silent():
        monkeypatch.setattr(world.orchestrator, "_fail_request_client_error", Mock(side_effect=KeyError("ours")))
        world.submit("bad", "DELTA", (0, 2))
        world.loop.go_on(0.01)
        assert patch.state is State.FAILED
    assert world.task.exception() is SURROGATE


@pytest.mark.parametrize("patches", [(), ("submission_errors",)], ids=["stock", "submission_errors"])
@pytest.mark.parametrize(
    "error",
    [SURROGATE, RuntimeError("no such shape"), OSError("no buffers"), ZMQError(11), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_the_orchestrator(world: World, error: Exception, patches: tuple[str, ...]) -> None:
    """Every exception ends stock's orchestrator; with the patch only one that is not about the request does."""
    refuse(world, 0, error)
    with only(*patches):
        world.submit("bad", "DELTA", (0, 2))
        world.loop.go_on(0.01)
    serves_on = bool(patches) and isinstance(error, (ValueError, RuntimeError))
    assert world.task.done() is not serves_on
    if world.task.done():
        assert world.task.exception() is error


def test_the_error_message_can_be_encoded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception's message may contain the surrogate that caused it."""
    refuse(world, 0, ValueError("not \ud800"))
    with only("submission_errors"):
        from omni_fastpath.patches.submission_errors import wrappers

        monkeypatch.setattr(wrappers, "logger", Mock())  # pytest's worker cannot send a log with a surrogate in it
        submit(world, "bad")
    [(_, _, said, *_)] = world.got["bad"].errors
    assert said.encode() == rb"The request could not be submitted: ValueError: not \ud800"


def test_a_dead_engine_keeps_its_meaning(world: World) -> None:
    """Upstream evicts the replica and fails the request as one without a live replica."""
    refuse(world, 0, EngineDeadError())
    with only("submission_errors") as on:
        submit(world, "bad")
        assert on.counters["failed_alone"] == 0
    assert [fatal for fatal, *_ in world.got["bad"].errors] == [True]


def test_a_companion_fails_with_its_parent(world: World) -> None:
    """No other request fails."""
    refuse(world, 0, SURROGATE, "companion")
    params = [SamplingParams()]
    message = AddCompanionRequestMessage(
        companion_id="companion",
        parent_id="parent",
        role="negative",
        prompt=engine_request("companion", [1], params[0]),
        companion_prompt_text=None,
        sampling_params_list=params,
    )
    with only("submission_errors"):
        submit(world, "parent")
        world.pipeline.requests.sync_q.put_nowait(message)
        world.advance(0.01)
    assert [fatal for fatal, *_ in world.got["parent"].errors] == [False]
    assert {name for _, name in world.left()} == {"good"}


def test_an_update_ends_its_session(world: World) -> None:
    """A later segment that cannot be encoded ends its streaming-input session with an error."""
    with only("submission_errors"):
        submit(world, "bad", "first")
        refuse(world, 0, SURROGATE)
        submit(world, "bad", "last")
    assert [fatal for fatal, *_ in world.got["bad"].errors] == [False]
    assert {name for _, name in world.left()} == {"good"}
