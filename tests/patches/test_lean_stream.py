"""A streamed chat answer: upstream's own generator, and each of its bytes."""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

SERVING = "vllm_omni.entrypoints.openai.serving_chat"
TEXTS = (
    " Hello",
    "",
    "世界",
    '"\\/\b\f\n\r\t\x00\x1f\x7f',
    "\u2028\ufeff\U0001f600",
    "\ue000text\ue001",
    "7310482956173849",
    " end",
)


@pytest.fixture(autouse=True)
def _levels_of_handlers() -> Iterator[None]:
    """A library below the API server sets the level of all handlers of the root when it is imported, pytest's too."""
    levels = [(handler, handler.level) for handler in logging.getLogger().handlers]
    yield
    for handler, level in levels:
        handler.setLevel(level)


@contextmanager
def switched_on(**values: Any) -> Iterator[dict[str, int]]:
    """The patch installed with these values; its counters."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES
    from omni_fastpath.patches.lean_stream import PATCH

    name = "OMNI_FASTPATH_LEAN_STREAM"
    variables = {f"{name}__{key.upper()}": str(value) for key, value in values.items()}
    apply(config.resolve([], {name: "1", **variables}, PATCHES), Process.SERVER)
    entry = LEDGER.named(PATCH.name)
    assert entry.state is State.APPLIED, entry.reason
    for counter in entry.counters:
        entry.counters[counter] = 0
    try:
        yield entry.counters
    finally:
        uninstall(PATCH)


def _state() -> tuple[str, str]:
    from omni_fastpath.ledger import LEDGER

    entry = LEDGER.named("lean_stream")
    return entry.state.value, entry.reason


def _serving() -> Any:
    """The real class, with as much of an instance as a streamed answer asks for."""
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    found = object.__new__(OmniOpenAIServingChat)
    values = {
        "use_harmony": False,
        "parser_cls": None,
        "tool_parser": None,  # this and the next 0.22's
        "tool_call_id_type": "random",
        "enable_auto_tools": False,
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "enable_prompt_tokens_details": False,
        "request_logger": None,
        "response_role": "assistant",
        "model_config": SimpleNamespace(hf_config=SimpleNamespace(model_type="none")),
        "engine_client": SimpleNamespace(
            request_states={}, mod_metrics=None, engine=None, errored=False, model_config=None
        ),
    }
    vars(found).update(values)
    return found


def _request(**more: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    given: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Say it"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "modalities": ["text", "audio"],
        **more,
    }
    return ChatCompletionRequest(**given)


def _output(kind: str, choices: Sequence[Any], *, finished: bool = False, **more: Any) -> Any:
    from vllm.outputs import RequestOutput
    from vllm_omni.outputs import OmniRequestOutput

    told = {"stage_id": 0 if kind == "text" else 2, "final_output_type": kind, **more}
    if "request_output" in inspect.signature(OmniRequestOutput).parameters:  # up to 0.26 one stands in the other
        inner = RequestOutput("one", None, [1, 2, 3], None, list(choices), finished)
        return OmniRequestOutput(request_id="one", request_output=inner, finished=finished, **told)
    return OmniRequestOutput(
        request_id="one", prompt_token_ids=[1, 2, 3], outputs=list(choices), finished=finished, **told
    )


def _token(text: str, number: int, *, index: int = 0, finish: str | None = None, logprobs: Any = None) -> Any:
    from vllm.outputs import CompletionOutput

    return CompletionOutput(index, text, [number], None, logprobs, finish_reason=finish)


def _sound(*, finish: str | None = None) -> Any:
    import torch

    found = _token("", 7, finish=finish)
    found.multimodal_output = {"audio": torch.linspace(-1, 1, 480), "sr": 24000}
    return found


def _outputs(texts: Sequence[str] = TEXTS, *, indexes: Sequence[int] = (0,), **more: Any) -> list[Any]:
    """Of one request: text with audio between, and both ends."""
    found = []
    for number, text in enumerate(texts):
        found.append(_output("text", [_token(text, number, index=index) for index in indexes], **more))
        if number % 3 == 2:
            found.append(_output("audio", [_sound()]))
    found.append(_output("text", [_token("!", 99, index=index, finish="stop") for index in indexes], finished=True))
    found.append(_output("audio", [_sound(finish="stop")], finished=True))
    return found


async def _from(outputs: Sequence[Any]) -> AsyncIterator[Any]:
    for each in outputs:
        await asyncio.sleep(0)
        yield each


def _stream(serving: Any, request: Any, outputs: Any, *, model: str = "m", one: str = "chatcmpl-1") -> Any:
    metadata = vars(importlib.import_module(SERVING))["RequestResponseMetadata"](request_id=one)
    generator = serving.chat_completion_stream_generator
    counts = {"mm_token_counts": None} if "mm_token_counts" in inspect.signature(generator).parameters else {}
    found = generator(request, outputs, one, model, [], None, metadata, None, **counts, raw_request=None)
    return found, metadata


async def _events(request: Any, outputs: Sequence[Any], **more: Any) -> tuple[list[str], Any]:
    stream, metadata = _stream(_serving(), request, _from(outputs), **more)
    events = [event async for event in stream]
    return events, metadata.final_usage_info


async def written() -> None:
    """Two answers of which one wants audio alone, written through upstream's generator as it stands."""
    for modalities in (["text", "audio"], ["audio"]):
        assert await _events(_request(modalities=modalities), _outputs())


@pytest.fixture(autouse=True)
def _one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events say when their request was made."""
    import time

    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.25)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "text and audio": ({}, {}, 8),
    "no usage": ({"stream_options": None}, {}, 8),
    "usage at the end": ({"stream_options": {"include_usage": True}}, {}, 8),
    "text alone": ({"modalities": ["text"]}, {}, 8),
    "two choices": ({"n": 2}, {"indexes": (0, 1)}, 16),
    "token ids": ({"return_token_ids": True}, {}, 0),
    "one tool call at a time": ({"parallel_tool_calls": False}, {}, 8),
    "stage metrics kept back": ({}, {"metrics": {"stage_metrics": {"0": {"x": 1.5}}}}, 8),
    "stage metrics": ({"return_stage_metrics": True}, {"metrics": {"stage_metrics": {"0": {"x": 1.5}}}}, 0),
    "echo": ({"echo": True}, {}, 8),
}


@pytest.mark.parametrize("case", CASES)
async def test_events_are_upstreams(case: str) -> None:
    """Byte for byte, whatever the request asks for, and the usage that the server's log gets."""
    asked, given, lean = CASES[case]
    request, outputs = _request(**asked), _outputs(**given)
    expected = await _events(request, outputs)
    assert sum("Hello" in event for event in expected[0]) == max(1, len(given.get("indexes", (0,))))
    assert not any('"error"' in event for event in expected[0])
    with switched_on() as counters:
        found = await _events(request, outputs)
        assert found == expected
        assert found[1].model_fields_set == expected[1].model_fields_set
        assert repr(found[1]) == repr(expected[1])
        assert (counters["streams"], counters["events"]) == (1, lean)
        assert _state()[0] == "applied"


@pytest.mark.parametrize("name", ['a "model"', "7310482956173849", "\ue000text\ue001", "模型"])
async def test_names_are_written_as_they_are(name: str) -> None:
    """A model or a request's id with whatever in it, also what marks the places of a form."""
    for more in ({"model": name}, {"one": name}):
        expected = await _events(_request(), _outputs(), **more)
        with switched_on():
            assert await _events(_request(), _outputs(), **more) == expected
            assert _state()[0] == "applied"


async def test_a_long_id_is_not_kept() -> None:
    """A client chooses the id, and a form outlives its request: one with a longer id is upstream's, and takes none."""
    for length, lean in ((256, len(TEXTS)), (257, 0)):
        one = "chatcmpl-".ljust(length, "x")
        expected = await _events(_request(), _outputs(), one=one)
        with switched_on() as counters:
            assert await _events(_request(), _outputs(), one=one) == expected
            assert counters["events"] == lean
            assert _state()[0] == "applied"


async def test_a_call_through_the_class_is_one_too() -> None:
    """A subclass that names its base instead of ``super()``: the same events, and the patch goes on."""
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat as Base

    class Named(Base):  # type: ignore[misc] # upstream has no types
        def chat_completion_stream_generator(self, *args: Any, **kwargs: Any) -> Any:
            return Base.chat_completion_stream_generator(self, *args, **kwargs)

    expected = await _events(_request(), _outputs())
    serving = _serving()
    serving.__class__ = Named
    with switched_on() as counters:
        stream, _ = _stream(serving, _request(), _from(_outputs()))
        assert [event async for event in stream] == expected[0]
        assert _state()[0] == "applied"
        assert (counters["streams"], counters["events"]) == (1, len(TEXTS))


async def test_two_requests_of_one_id_do_not_mix() -> None:
    """A client chooses the id: two at the same time, of another model, with and without usage."""
    requests = (_request(), _request(stream_options=None))
    alone = [await _events(request, _outputs(), model=str(n)) for n, request in enumerate(requests)]
    with switched_on():
        together = await asyncio.gather(
            *(_events(request, _outputs(), model=str(n)) for n, request in enumerate(requests))
        )
    assert together == alone


def test_every_character_is_escaped_as_pydantic_does() -> None:
    """All of Unicode but half characters, which are left to upstream."""
    from json.encoder import encode_basestring

    from pydantic_core import to_json

    for first in range(0, 0x110000, 0x800):
        if first == 0xD800:
            continue
        text = "".join(map(chr, range(first, first + 0x800)))
        assert encode_basestring(text) == to_json(text).decode()


async def test_half_a_character_is_upstreams_error() -> None:
    """What cannot be sent ends the stream with upstream's error."""
    outputs = _outputs(("a", "\ud800", "b"))
    expected = await _events(_request(), outputs)
    assert any("surrogates" in event for event in expected[0])
    with switched_on() as counters:
        assert await _events(_request(), outputs) == expected
        assert counters["events"] == 1
        assert _state()[0] == "applied"


@pytest.mark.parametrize("where", ["text", "_form", "_is_plain", "usage"])
async def test_an_error_of_ours_steps_aside(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever breaks, the events are upstream's, and later ones are made by upstream."""
    from omni_fastpath.patches.lean_stream import events

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("ours")

    expected = await _events(_request(), _outputs())
    owner: Any = {"text": events.Form, "_is_plain": events}.get(where, events.Events)
    name = {"usage": "_bare_usage"}.get(where, where)
    with switched_on() as counters:
        assert await _events(_request(), _outputs()) == expected
        monkeypatch.setattr(owner, name, broken)
        assert await _events(_request(), _outputs(), one="chatcmpl-2") == (
            [event.replace("chatcmpl-1", "chatcmpl-2") for event in expected[0]],
            expected[1],
        )
        state, reason = _state()
        assert state == "failed"
        assert "ours" in reason
        before = dict(counters)
        monkeypatch.undo()
        monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
        assert await _events(_request(), _outputs()) == expected
        assert counters == before


async def test_an_event_that_differs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first event of a form is compared with upstream's."""
    from omni_fastpath.patches.lean_stream import events

    expected = await _events(_request(), _outputs())
    with switched_on():
        monkeypatch.setattr(events, "encode_basestring", lambda text: json.dumps(text, ensure_ascii=True))
        assert await _events(_request(), _outputs(("世界", "b"))) != expected
        monkeypatch.undo()
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
    outputs = _outputs(("世界", "b"))
    expected = await _events(_request(), outputs)
    with switched_on():
        monkeypatch.setattr(events.Form, "text", lambda *_: "{}")
        assert await _events(_request(), outputs) == expected
        assert _state() == (
            "failed",
            "an event is not as pydantic writes it; upstream works alone from here on",
        )


def test_what_is_asked_besides_is_the_models() -> None:
    """A delta, a choice and an event are upstream's models to whoever looks at more than the event's text."""
    from omni_fastpath.patches.lean_stream.events import NAMES, Events

    serving = importlib.import_module(SERVING)
    failures: list[str] = []
    made = Events(vars(serving), lambda: False, failures.append, {"events": 0})

    def event(names: Any) -> Any:
        delta, choice, chunk, usage = (names[name] for name in NAMES)
        one = choice(index=0, delta=delta(content="x"), logprobs=None, finish_reason=None, token_ids=None)
        found = chunk(
            id="i", object="chat.completion.chunk", created=1, choices=[one], model="m", modality="text", metrics=None
        )
        found.usage = usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
        return found

    ours, theirs = event(made.stand_ins()), event(vars(serving))
    assert ours.model_dump() == theirs.model_dump()
    assert ours.model_dump_json() == theirs.model_dump_json()
    assert ours.model_dump_json(exclude_unset=True) == theirs.model_dump_json(exclude_unset=True)
    assert ours.choices == theirs.choices
    assert ours.given["choices"][0].delta == theirs.choices[0].delta
    assert ours.given["choices"][0].given["delta"].tool_calls == []
    assert ours.usage == theirs.usage
    assert made.stand_ins()["DeltaMessage"].model_construct(role="r").role == "r"
    assert failures == []


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.name, record.levelname, record.getMessage()))


@pytest.fixture
def log() -> Iterator[_Log]:
    """What vLLM's and vLLM-Omni's loggers write."""
    handler, root = _Log(), logging.getLogger("vllm")
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)


UNNEEDED = (SERVING, "WARNING", "final output type: text is not needed by the request")


async def test_each_warning_is_written(log: _Log) -> None:
    """By default the log is stock's: a warning for each token of a request that wants audio alone."""
    request, outputs = _request(modalities=["audio"]), _outputs()
    expected = await _events(request, outputs)
    lines = list(log.lines)
    assert lines.count(UNNEEDED) == len(TEXTS) + 1
    log.lines.clear()
    with switched_on():
        log.lines.clear()
        assert await _events(request, outputs) == expected
        assert log.lines == lines


async def test_warnings_are_counted(log: _Log) -> None:
    """``once``: the same events, upstream's warning for the first, and their number at the end."""
    request, outputs = _request(modalities=["audio"]), _outputs()
    expected = await _events(request, outputs)
    with switched_on(unneeded="once") as counters:
        log.lines.clear()
        assert await _events(request, outputs) == expected
        said = (
            "vllm.omni_fastpath",
            "WARNING",
            "omni-fastpath: 9 outputs of type text were not needed by request chatcmpl-1",
        )
        assert log.lines == [UNNEEDED, said]
        assert counters["left_out"] == len(TEXTS)
        log.lines.clear()
        await _events(_request(), outputs)
        assert log.lines == []


async def test_a_request_that_is_left_says_its_number_too(log: _Log) -> None:
    """``once``: a client that goes away ends upstream's generator of the outputs as on stock; the number is said."""
    ended: list[BaseException] = []

    async def outputs() -> AsyncIterator[Any]:
        try:
            for each in _outputs():
                yield each
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(error)
            raise

    for cancelled in (False, True):
        for value in ("each", "once"):
            with switched_on(unneeded=value):
                log.lines.clear()
                stream, _ = _stream(_serving(), _request(modalities=["audio"]), outputs())
                if cancelled:

                    async def read(stream: Any = stream) -> None:
                        async for _ in stream:
                            pass

                    task = asyncio.create_task(read())
                    await asyncio.sleep(0.05)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    await anext(stream)
                    await stream.aclose()
                del stream
                gc.collect()
                await asyncio.sleep(0.01)
                assert len([line for line in log.lines if "were not needed by request" in line[2]]) == (value == "once")
                assert [type(error) for error in ended] == [asyncio.CancelledError if cancelled else GeneratorExit]
                ended.clear()


async def test_tokens_off_is_upstreams_events() -> None:
    """``tokens: false``: upstream's own generator runs."""
    expected = await _events(_request(), _outputs())
    with switched_on(tokens="false") as counters:
        assert await _events(_request(), _outputs()) == expected
        assert (counters["streams"], counters["events"]) == (1, 0)


def test_off_is_upstreams_own() -> None:
    """Taken off, the slot is upstream's own function."""
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    before = vars(OmniOpenAIServingChat)["chat_completion_stream_generator"]
    with switched_on():
        assert vars(OmniOpenAIServingChat)["chat_completion_stream_generator"] is not before
    assert vars(OmniOpenAIServingChat)["chat_completion_stream_generator"] is before


async def test_a_module_that_changes_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody writes into upstream's module later is what a new stream uses."""
    serving = importlib.import_module(SERVING)
    with switched_on():
        await _events(_request(), _outputs())
        monkeypatch.setattr(serving, "as_list", lambda _: [12345])
        request = _request(return_token_ids=True)
        events, _ = await _events(request, _outputs())
    assert any("[12345]" in event for event in events)
