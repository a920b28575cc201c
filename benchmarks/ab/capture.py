"""A client that records the answers of a server so that two servers can be compared.

A `Capture` contains text and audio with their times of arrival, and nothing that differs in every run (request ids,
creation times, metrics). Text and audio of a request come from different stages. Therefore, even on one server, timing
determines their order, how many text tokens share an event, the usage in an audio event, and whether text or audio has
the finish reason (the one that ends last). `Capture.answer` contains only what must be equal: the joined text and token
ids, the audio chunks, the images, the final usage, and how the request ended.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import io
import json
import time
import wave
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 300.0
_WAV_HEADER_BYTES = 44
_LONGEST_LINE_BYTES = 1 << 24
"""The maximum size of an event with audio or an image."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request: a path such as ``/v1/chat/completions`` and a JSON body."""

    path: str
    body: Mapping[str, Any]
    abort_after: int | None = None
    """Close the connection after this many events. None means to read to the end."""


def chat_request(
    prompt: str,
    *,
    modalities: Sequence[str] = ("text", "audio"),
    stream: bool = True,
    abort_after: int | None = None,
    **body: Any,
) -> Request:
    """A chat completion like those of ``vllm bench serve --omni --backend openai-chat-omni``."""
    message = {"role": "user", "content": prompt}
    data: dict[str, Any] = {"messages": [message], "modalities": list(modalities), "temperature": 0.0}
    if stream:
        data |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return Request("/v1/chat/completions", {**data, **body}, abort_after)


def wav_file(samples: bytes, rate: int) -> str:
    """A WAV file (base64) with one channel of 16-bit samples at *rate* Hz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(rate)
        made.writeframes(samples)
    return base64.b64encode(file.getvalue()).decode()


def speech_request(text: str, *, voice: str = "vivian", **body: Any) -> Request:
    """A speech request with streamed raw PCM as its answer, like those of upstream's benchmark."""
    data = {"input": text, "voice": voice, "stream": True, "stream_format": "audio", "response_format": "pcm"}
    return Request("/v1/audio/speech", {**data, **body})


@dataclasses.dataclass(frozen=True)
class Piece:
    """A received piece of text or audio."""

    at_s: float
    """Arrival, seconds after the request was sent."""
    text: str = ""
    audio: bytes = b""
    """For chat a WAV file, for speech raw PCM or the requested format."""
    metadata: Any = None
    """The server's metadata of the audio."""


@dataclasses.dataclass
class Capture:
    """The answer to one request."""

    request: Request
    started_at_s: float
    """When it was sent, `time.monotonic` seconds."""
    status: int | None = None
    """HTTP status. None if there was no answer."""
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    is_byte_stream: bool = False
    """The audio is one stream of bytes, whose pieces have no meaning."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    images: list[Any] = dataclasses.field(default_factory=list)
    finish_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    """Finish reason by modality."""
    usage: Mapping[str, Any] | None = None
    """The last usage record of the whole request."""
    error: str | None = None
    """A transport error, an HTTP error body, an error event, or an error at the end of the stream."""
    error_code: int | str | None = None
    aborted: bool = False
    """The client closed the connection because of ``abort_after``."""
    e2e_s: float = 0.0
    """Seconds from sending to the end of the answer."""

    @property
    def text(self) -> str:
        """All text, joined."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def audio_pieces(self) -> list[Piece]:
        """The pieces with audio."""
        return [piece for piece in self.pieces if piece.audio]

    @property
    def audio(self) -> bytes:
        """All samples, joined, WAV headers removed."""
        files = [piece.audio for piece in self.audio_pieces]
        return b"".join(map(_samples, [b"".join(files)] if self.is_byte_stream else files))

    @property
    def succeeded(self) -> bool:
        """Whether the answer is complete and has no error."""
        return self.status == 200 and self.error is None and not self.aborted

    def fail(self, error: Any) -> None:
        """Record an error, a mapping with message and code or a text. Only the first one is recorded."""
        if self.error is not None:
            return
        if isinstance(error, Mapping):
            self.error_code = error.get("code")
            error = error.get("message", error)
        self.error = str(error)

    def add(self, data: Mapping[str, Any], at_s: float) -> None:
        """Record a chunk of a streamed chat answer, or a complete chat answer."""
        if data.get("error") is not None:
            self.fail(data["error"])
        choices = data.get("choices") or ()
        for choice in choices:
            self._add_choice(choice, data.get("modality"), at_s)
        if data.get("usage") and (not choices or data.get("object") == "chat.completion"):
            self.usage = data["usage"]

    def _add_choice(self, choice: Mapping[str, Any], modality: str | None, at_s: float) -> None:
        """Record a choice. A streamed one has a modality, with audio as its content. A complete message has both."""
        part: Mapping[str, Any] = choice.get("delta") or choice.get("message") or {}
        content, audio = part.get("content"), part.get("audio")
        if modality == "audio":
            content, audio = None, {"data": content}
        if isinstance(content, list):
            self.images += [each.get("image_url") for each in content]
        elif content:
            self.pieces.append(Piece(at_s, content))
        if audio is not None:
            samples = base64.b64decode(audio.get("data") or "")
            self.pieces.append(Piece(at_s, audio=samples, metadata=choice.get("audio_metadata")))
        self.token_ids += choice.get("token_ids") or ()
        if choice.get("finish_reason"):
            self.finish_reasons[modality or ("text" if audio is None else "audio")] = choice["finish_reason"]

    def answer(self) -> dict[str, Any]:
        """What must be equal for two servers, as JSON data. Nothing in it depends on timing."""
        audio = self.audio
        chunks = [] if self.is_byte_stream else self.audio_pieces
        asked = self.request.body.get("modalities") or ()
        return {
            "status": self.status,
            "text": self.text,
            "token_ids": self.token_ids,
            "images": [_digest(image) for image in self.images],
            "audio_sha256": _sha256(audio),
            "audio_bytes": len(audio),
            "audio_chunks": [[_sha256(piece.audio), piece.metadata] for piece in chunks],
            "finished": bool(self.finish_reasons),
            "finish_reasons": self.finish_reasons if len(asked) == 1 else None,
            "usage": self.usage,
            "error": self.error,
            "error_code": self.error_code,
        }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(data: Any) -> str:
    return _sha256(json.dumps(data, sort_keys=True).encode())


def _samples(audio: bytes) -> bytes:
    return audio[_WAV_HEADER_BYTES:] if audio[:4] == b"RIFF" and audio[36:40] == b"data" else audio


def session(base_url: str, *, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """An HTTP session for ``send``, an async context manager. Create it inside an event loop."""
    return aiohttp.ClientSession(
        base_url,
        # One connection per request, so that no request waits for a pool.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        headers=headers,
        read_bufsize=_LONGEST_LINE_BYTES,
    )


async def send(to: aiohttp.ClientSession, request: Request) -> Capture:
    """Send one request and record the answer until it ends, fails or is aborted."""
    return await follow(to, Capture(request, time.monotonic()))


async def follow(
    to: aiohttp.ClientSession, capture: Capture, reads: asyncio.Event | None = None, **how: Any
) -> Capture:
    """As `send`, into a capture that others can look at, and perhaps not reading before it is time to."""
    try:
        async with to.post(capture.request.path, json=dict(capture.request.body), **how) as response:
            capture.status = response.status
            if reads is not None:
                await reads.wait()
            await _record(capture, response)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, OSError) as error:
        capture.fail(f"{type(error).__name__}: {error}")
    capture.e2e_s = time.monotonic() - capture.started_at_s
    return capture


async def _record(capture: Capture, response: aiohttp.ClientResponse) -> None:
    """Read an answer: an error, server-sent events, JSON, or a byte stream of audio."""
    kind = response.headers.get("Content-Type", "").partition(";")[0]
    if response.status != 200:
        data = await response.json() if kind == "application/json" else await response.text()
        capture.fail(data.get("error", data) if isinstance(data, Mapping) else data)
    elif kind == "text/event-stream":
        await _record_events(capture, response.content)
    elif kind == "application/json":
        capture.add(await response.json(), time.monotonic() - capture.started_at_s)
    else:
        capture.is_byte_stream = True
        async for samples in response.content.iter_any():
            capture.pieces.append(Piece(time.monotonic() - capture.started_at_s, audio=samples))


async def _record_events(capture: Capture, content: aiohttp.StreamReader) -> None:
    has_ended = False
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        if has_ended:
            capture.fail("there was an event after [DONE]")
        data = line[5:].strip()
        has_ended = data == b"[DONE]"
        if not has_ended:
            capture.add(json.loads(data), time.monotonic() - capture.started_at_s)
        if capture.request.abort_after is not None and len(capture.pieces) >= capture.request.abort_after:
            capture.aborted = True
            return
    if not has_ended:
        capture.fail("the event stream ended without [DONE]")


def answers_differ(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The differences between two runs of the same requests, one line each, from their `Capture.answer`."""
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} captures against {len(theirs)}"]
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        unequal = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        found += [f"request {index}: {key}: {mine.get(key)!r} against {other.get(key)!r}" for key in unequal]
    return found
