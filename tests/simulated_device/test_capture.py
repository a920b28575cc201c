"""The capture client reads what a server sends, however the transport cuts it, and compares what must be equal."""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from benchmarks.rigs.captures import audio_gaps_s, differences, digest, ttfp_s, ttft_s  # noqa: E402
from omni_fastpath.tools.ab.capture import Capture, Request, chat_request, send, session  # noqa: E402

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
    assert ttft_s(whole) is not None
    assert ttfp_s(whole) is not None
    assert len(audio_gaps_s(whole)) == 1


async def test_ids_and_interleaving_do_not_count(serve: Serve) -> None:
    """Two answers that differ in ids, times, text grouping, interleaving and the last to end are the same answer."""
    one = [chunk("text", "ab", number=1), audio_chunk(b"12", number=1), chunk("text", "c", number=1, finish="length")]
    two = [chunk("text", "a", number=2), chunk("text", "bc", number=2), audio_chunk(b"12", number=2, finish="stop")]
    captures = [await captured(await serve(events(chunks)), chat_request("x")) for chunks in (one, two)]
    assert differences(captures[:1], captures[1:]) == []
    assert digest(captures[0]) == digest(captures[1])


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
    ("ends", "error"), [(0, "the event stream ended without [DONE]"), (1, None), (2, "there was an event after [DONE]")]
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
