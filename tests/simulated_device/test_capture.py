"""The capture client reads what a server sends, however the transport cuts it, and compares what must be equal."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

from benchmarks.ab.capture import Capture, Request, chat_request, send, session  # noqa: E402
from benchmarks.rigs.captures import audio_gaps_s, differences, digest, ttfp_s, ttft_s  # noqa: E402

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CHAT = chat_request("x")


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


async def captured(handler: Handler) -> Capture:
    """The capture of a request that this handler answers."""
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    async with TestServer(app) as server, session(str(server.make_url("/"))) as to:
        return await send(to, CHAT)


def recorded(*chunks: Mapping[str, Any], request: Request = CHAT) -> Capture:
    """The capture of an answer that consists of these chunks."""
    found = Capture(request, 0.0, status=200)
    for number, each in enumerate(chunks):
        found.add(each, float(number))
    return found


async def test_events_survive_any_cut() -> None:
    """Text with multi-byte characters and audio are the same if the transport cuts behind every byte."""
    chunks = [chunk("text", "é"), audio_chunk(b"12"), chunk("text", "日本"), audio_chunk(b"34", finish="stop")]
    whole, cut = await captured(events(chunks)), await captured(events(chunks, cut=1))
    assert (whole.text, whole.audio, whole.finish_reasons) == ("é日本", b"1234", {"audio": "stop"})
    assert whole.succeeded
    assert differences([whole], [cut]) == []
    assert ttft_s(whole) is not None
    assert ttfp_s(whole) is not None
    assert len(audio_gaps_s(whole)) == 1


def test_ids_and_interleaving_do_not_count() -> None:
    """Answers that differ in ids, times, text grouping, interleaving and the last to end are the same answer."""
    one = recorded(chunk("text", "ab", number=1), audio_chunk(b"12"), chunk("text", "c", finish="length"))
    two = recorded(chunk("text", "a"), chunk("text", "bc", number=2), audio_chunk(b"12", finish="stop"))
    assert differences([one], [two]) == []
    assert digest(one) == digest(two)


def painted(image: str) -> dict[str, Any]:
    """A chat answer with an image."""
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": {"content": [part]}}]}


TEXT_ALONE = chat_request("x", modalities=["text"])
PLAIN = recorded(audio_chunk(b"12"), audio_chunk(b"34"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, recorded(audio_chunk(b"1234"))),
        (PLAIN, recorded(audio_chunk(b"34"), audio_chunk(b"12"))),
        (recorded(painted("ab")), recorded(painted("ac"))),
        [recorded(chunk("text", "a", finish=each), request=TEXT_ALONE) for each in ("length", "stop")],
    ],
)
def test_what_makes_another_answer(one: Capture, other: Capture) -> None:
    """Merged audio, audio in another order, another image, the finish reason of a single modality."""
    assert differences([one], [other])


@pytest.mark.parametrize(
    ("ends", "error"), [(0, "the event stream ended without [DONE]"), (1, None), (2, "there was an event after [DONE]")]
)
async def test_an_answer_ends_once_and_last(ends: int, error: str | None) -> None:
    """A stream without its end mark did not succeed, and neither did one with a second."""
    capture = await captured(events([chunk("text", "a")], ends=ends))
    assert (capture.error, capture.succeeded) == (error, error is None)


async def test_error_event_and_error_status_are_kept() -> None:
    """Both are in the capture with their code."""
    streamed = await captured(events([{"error": {"message": "boom", "code": 500}}]))
    assert (streamed.status, streamed.error, streamed.error_code, streamed.succeeded) == (200, "boom", 500, False)

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "bad", "code": 400}}, status=400)

    refused = await captured(refuse)
    assert (refused.status, refused.error, refused.error_code) == (400, "bad", 400)
