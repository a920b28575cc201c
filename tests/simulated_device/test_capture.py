"""The capture client reads what a server sends, however the transport cuts it, and compares what must be equal."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from omni_fastpath.tools.ab.capture import (  # noqa: E402
    Capture,
    Request,
    chat_request,
    differences,
    run_closed_loop,
    send,
    session,
    speech_request,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a small HTTP server around one handler; gives its address."""
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def wav(samples: bytes) -> bytes:
    """A WAV file as the chat endpoint makes one per chunk."""
    header = b"RIFF" + b"\0" * 4 + b"WAVEfmt " + b"\0" * 20 + b"data" + b"\0" * 4
    assert len(header) == 44
    return header + samples


def chunk(modality: str, content: str, *, number: int = 0, finish: str | None = None) -> dict[str, Any]:
    """One chat chunk as vllm-omni sends it."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": f"chatcmpl-{number}", "created": number, "modality": modality, "choices": [choice], "metrics": {}}


def audio_chunk(samples: bytes, **values: Any) -> dict[str, Any]:
    """One chat chunk with audio."""
    return chunk("audio", base64.b64encode(wav(samples)).decode(), **values)


def events(chunks: list[dict[str, Any]], *, cut: int = 1 << 20, ends: int = 1) -> Handler:
    """A handler that streams *chunks*, handed to the transport *cut* bytes at a time."""
    blocks = [f"data: {json.dumps(item, ensure_ascii=False)}\n\n" for item in chunks] + ["data: [DONE]\n\n"] * ends
    data = "".join(blocks).encode()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(data), cut):
            await response.write(data[start : start + cut])
        return response

    return handler


async def captured(url: str, request: Request) -> Capture:
    """The capture of one request."""
    async with session(url) as to:
        return await send(to, request)


async def test_events_survive_any_cut(serve: Serve) -> None:
    """Text with multi-byte characters and audio come out the same when the transport cuts every byte."""
    chunks = [chunk("text", "é"), audio_chunk(b"12"), chunk("text", "日本"), audio_chunk(b"34", finish="stop")]
    whole = await captured(await serve(events(chunks)), chat_request("x"))
    cut = await captured(await serve(events(chunks, cut=1)), chat_request("x"))
    assert (whole.text, whole.audio, whole.finish_reasons) == ("é日本", b"1234", {"audio": "stop"})
    assert whole.succeeded
    assert differences([whole], [cut]) == []
    assert whole.ttft_s is not None
    assert whole.ttfp_s is not None
    assert len(whole.audio_gaps_s) == 1


async def test_ids_and_interleaving_do_not_count(serve: Serve) -> None:
    """Two answers that differ in ids, times, text grouping, interleaving and the last to end are the same answer."""
    one = [chunk("text", "ab", number=1), audio_chunk(b"12", number=1), chunk("text", "c", number=1, finish="length")]
    two = [chunk("text", "a", number=2), chunk("text", "bc", number=2), audio_chunk(b"12", number=2, finish="stop")]
    captures = [await captured(await serve(events(chunks)), chat_request("x")) for chunks in (one, two)]
    assert differences(captures[:1], captures[1:]) == []
    assert captures[0].digest() == captures[1].digest()


async def test_finish_reason_of_a_lone_modality_counts(serve: Serve) -> None:
    """Asked for text alone, an answer that was cut differs from one that ended by itself."""
    one, two = ([chunk("text", "a", finish=reason)] for reason in ("length", "stop"))
    captures = [
        await captured(await serve(events(chunks)), chat_request("x", modalities=["text"])) for chunks in (one, two)
    ]
    assert len(differences(captures[:1], captures[1:])) == 1


async def test_merged_or_reordered_audio_counts(serve: Serve) -> None:
    """Audio chunks that are merged or change places make a different answer."""
    plain = [audio_chunk(b"12"), audio_chunk(b"34")]
    first = await captured(await serve(events(plain)), chat_request("x"))
    for other in ([audio_chunk(b"1234")], [audio_chunk(b"34"), audio_chunk(b"12")]):
        second = await captured(await serve(events(other)), chat_request("x"))
        assert any("audio" in line for line in differences([first], [second]))


@pytest.mark.parametrize(
    ("ends", "error"), [(0, "the event stream ended without [DONE]"), (1, None), (2, "something came after [DONE]")]
)
async def test_an_answer_ends_once_and_last(serve: Serve, ends: int, error: str | None) -> None:
    """A stream that stops without its end mark did not succeed, nor did one that has another."""
    capture = await captured(await serve(events([chunk("text", "a")], ends=ends)), chat_request("x"))
    assert (capture.error, capture.succeeded) == (error, error is None)


async def test_error_event_and_error_status_are_kept(serve: Serve) -> None:
    """An error in the stream and an error status both end up in the capture with their code."""
    streamed = await captured(
        await serve(events([{"error": {"message": "boom", "code": 500}}])),
        chat_request("x"),
    )
    assert (streamed.status, streamed.error, streamed.error_code, streamed.succeeded) == (200, "boom", 500, False)

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "bad", "code": 400}}, status=400)

    refused = await captured(await serve(refuse), chat_request("x"))
    assert (refused.status, refused.error, refused.error_code) == (400, "bad", 400)


async def test_abort_stops_after_the_given_events(serve: Serve) -> None:
    """A request that is to be aborted closes the connection after that many events."""
    chunks = [chunk("text", letter) for letter in "abcdef"]
    capture = await captured(await serve(events(chunks)), chat_request("x", abort_after=2))
    assert (capture.aborted, capture.text, capture.succeeded) == (True, "ab", False)


async def test_byte_stream_is_one_piece_of_audio(serve: Serve) -> None:
    """How the transport cuts a speech answer does not count."""

    def stream(cut: int) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "audio/pcm"})
            await response.prepare(request)
            for start in range(0, 12, cut):
                await response.write(b"abcdefghijkl"[start : start + cut])
            return response

        return handler

    captures = [await captured(await serve(stream(cut)), speech_request("x")) for cut in (3, 12)]
    assert captures[0].audio == b"abcdefghijkl"
    assert differences(captures[:1], captures[1:]) == []


async def test_whole_answer_has_text_and_audio(serve: Serve) -> None:
    """A non-streaming answer carries text and audio in one message, and its usage."""
    message = {"content": "hi", "audio": {"id": "1", "data": base64.b64encode(wav(b"12")).decode()}}
    body = {"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {"total_tokens": 3}}

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    capture = await captured(await serve(handler), chat_request("x", stream=False))
    assert (capture.text, capture.audio, capture.usage) == ("hi", b"12", {"total_tokens": 3})


def answered(body: object) -> Handler:
    """A handler that answers *body* as JSON."""

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    return handler


async def test_images_in_a_chat_answer_are_compared(serve: Serve) -> None:
    """They are no text, and another image is another answer."""

    def painted(image: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": [part]}}]}

    one, other = [await captured(await serve(answered(painted(each))), chat_request("x")) for each in ("ab", "ac")]
    assert len(differences([other], [one])) == 1


async def test_the_usage_of_a_stream_is_its_last_chunk(serve: Serve) -> None:
    """A chunk without choices has it; those of audio have another."""
    usage = {"id": "1", "created": 1, "model": "m", "choices": [], "usage": {"total_tokens": 3}}
    chunks = [chunk("text", "a"), audio_chunk(b"12", finish="stop"), {"id": "2", "choices": []}, usage]
    capture = await captured(await serve(events(chunks)), chat_request("x"))
    assert capture.usage == {"total_tokens": 3}


async def test_closed_loop_keeps_order_and_limit(serve: Serve) -> None:
    """At most that many requests are in flight, and captures come back in the order of the requests."""
    flying, most = 0, 0
    answer = events([chunk("text", "a")])

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        try:
            return await answer(request)
        finally:
            flying -= 1

    requests = [chat_request(str(index)) for index in range(12)]
    captures = await asyncio.to_thread(run_closed_loop, await serve(handler), requests, 3)
    assert [capture.request for capture in captures] == requests
    begun = [capture.started_at_s for capture in captures]
    assert begun == sorted(begun)
    assert most <= 3
