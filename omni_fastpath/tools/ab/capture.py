"""A client that records everything a server answers, in a form in which two servers can be compared.

A `Capture` keeps each event as it arrived, with its time; what differs from run to run by nature (request ids, creation
times, timings in metrics) is removed. Text and audio of one request come from different stages, so the order in which
their events interleave, how many text tokens share an event, the running usage that an audio event repeats, and which
of the two carries the finish reason (the one that ends last) depend on timing even in one and the same server.
`Capture.answer` is therefore what must be equal: the text and token ids joined, the audio chunk by chunk, the final
usage, and how the request ended. What is neither chat nor speech is compared as the JSON that it is.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import aiohttp

Kind = Literal["text", "audio", "usage", "error", "other", "done"]

REQUEST_TIMEOUT_S = 300.0
_VOLATILE = frozenset(
    {"id", "created", "metrics", "request_id", "system_fingerprint", "stage_durations", "peak_memory_mb"}
)
_WAV_HEADER_BYTES = 44


@dataclasses.dataclass(frozen=True)
class Request:
    """What to send: a path such as ``/v1/chat/completions`` and a JSON body."""

    path: str
    body: Mapping[str, Any]
    abort_after: int | None = None
    """Close the connection after this many events; None: read to the end."""

    @property
    def stream(self) -> bool:
        """Whether the answer comes piece by piece."""
        return bool(self.body.get("stream"))


def chat_request(
    prompt: str,
    *,
    model: str | None = None,
    modalities: Sequence[str] = ("text", "audio"),
    max_tokens: int | None = None,
    stream: bool = True,
    abort_after: int | None = None,
    **body: Any,
) -> Request:
    """A chat completion, in the form that ``vllm bench serve --omni --backend openai-chat-omni`` sends."""
    message = {"role": "user", "content": prompt}
    data: dict[str, Any] = {"messages": [message], "modalities": list(modalities), "temperature": 0.0}
    if model is not None:
        data["model"] = model
    if max_tokens is not None:
        data["max_tokens"] = max_tokens
    if stream:
        data |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return Request("/v1/chat/completions", {**data, **body}, abort_after)


def speech_request(
    text: str,
    *,
    model: str | None = None,
    voice: str = "vivian",
    stream: bool = True,
    abort_after: int | None = None,
    **body: Any,
) -> Request:
    """A speech request; streamed, it answers with raw PCM as upstream's benchmark asks for it."""
    data: dict[str, Any] = {"input": text, "voice": voice}
    if model is not None:
        data["model"] = model
    if stream:
        data |= {"stream": True, "stream_format": "audio", "response_format": "pcm"}
    return Request("/v1/audio/speech", {**data, **body}, abort_after)


@dataclasses.dataclass(frozen=True)
class Event:
    """One server-sent event, one piece of a byte stream, or one whole JSON answer."""

    kind: Kind
    at_s: float
    """Arrival, seconds after the request was sent."""
    content: Mapping[str, Any]
    """What it said, without the volatile fields and without the audio itself."""
    audio: bytes = b""
    """Its audio as sent (for chat a WAV file of its own, for speech raw PCM or whatever format was asked for)."""


@dataclasses.dataclass
class Capture:
    """Everything one request brought back."""

    request: Request
    order: int
    """Position in which the request was started, from 0."""
    started_at_s: float
    """When it was sent, `time.monotonic` seconds."""
    status: int | None = None
    """HTTP status; None when there was no answer."""
    events: list[Event] = dataclasses.field(default_factory=list)
    error: str | None = None
    """Transport error, HTTP error body, or error event."""
    error_code: int | str | None = None
    aborted: bool = False
    """The client closed the connection, as the request asked."""
    e2e_s: float = 0.0
    """From sending to the end of the answer, seconds."""

    @property
    def text(self) -> str:
        """All text, joined."""
        return "".join(event.content.get("text") or "" for event in self.events if event.kind == "text")

    @property
    def token_ids(self) -> list[int]:
        """All token ids that the server sent along (``return_token_ids``)."""
        return [token for event in self.events for token in event.content.get("token_ids") or ()]

    @property
    def audio_events(self) -> list[Event]:
        """Events with audio in them."""
        return [event for event in self.events if event.audio]

    @property
    def audio(self) -> bytes:
        """All samples, joined, WAV headers removed."""
        pieces = [event.audio for event in self.audio_events]
        if self._events_are_cuts:
            return _samples(b"".join(pieces))
        return b"".join(_samples(piece) for piece in pieces)

    @property
    def _events_are_cuts(self) -> bool:
        """Whether the audio came as one byte stream, which the transport cuts where it likes."""
        return any("type" in event.content for event in self.audio_events)

    @property
    def audio_sha256(self) -> str:
        """Digest of `audio`."""
        return _sha256(self.audio)

    @property
    def finish_reasons(self) -> dict[str, str]:
        """Finish reason by modality."""
        found = ((event.content.get("modality"), event.content.get("finish_reason")) for event in self.events)
        return {str(modality): reason for modality, reason in found if reason}

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """The last usage record that speaks for the whole request."""
        whole = [event.content["usage"] for event in self.events if event.kind == "usage"]
        return whole[-1] if whole else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first text, seconds."""
        return next((event.at_s for event in self.events if event.kind == "text" and event.content.get("text")), None)

    @property
    def ttfp_s(self) -> float | None:
        """Time to first audio, seconds."""
        return next((event.at_s for event in self.audio_events), None)

    @property
    def audio_gaps_s(self) -> list[float]:
        """Times between successive audio events, seconds."""
        times = [event.at_s for event in self.audio_events]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def succeeded(self) -> bool:
        """Whether the request was answered to its end without an error."""
        return self.status == 200 and self.error is None and not self.aborted

    def fail(self, error: Any) -> None:
        """Note an error as upstream words it: a mapping with message and code, or a text."""
        if isinstance(error, Mapping):
            self.error_code = error.get("code")
            error = error.get("message", error)
        self.error = str(error)

    def answer(self) -> dict[str, Any]:
        """What two servers must agree on, as plain JSON data; nothing in it depends on time."""
        chunks = [] if self._events_are_cuts else self.audio_events
        asked = self.request.body.get("modalities") or ()
        other = [event.content for event in self.events if event.kind == "other"]
        return {
            "status": self.status,
            "text": self.text,
            "token_ids": self.token_ids,
            "audio_sha256": self.audio_sha256,
            "audio_bytes": len(self.audio),
            "audio_chunks": [_sha256(event.audio) for event in chunks],
            "audio_content": [_without(event.content, "usage", "finish_reason") for event in chunks],
            "finished": bool(self.finish_reasons),
            "finish_reasons": self.finish_reasons if len(asked) == 1 else None,
            "usage": self.usage,
            "error": self.error,
            "error_code": self.error_code,
            **({"other": _sha256(json.dumps(other, sort_keys=True).encode())} if other else {}),
        }

    def digest(self) -> str:
        """SHA-256 of `answer`."""
        return _sha256(json.dumps(self.answer(), sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _samples(audio: bytes) -> bytes:
    return audio[_WAV_HEADER_BYTES:] if audio[:4] == b"RIFF" and audio[36:40] == b"data" else audio


def _plain(value: Any) -> Any:
    """*value* without volatile fields, at any depth."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in _VOLATILE}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


async def _server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Data of each event; the transport may cut anywhere, also inside a character."""
    buffer = b""
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            block, buffer = buffer[:end], buffer[end + 2 :]
            lines = [line[5:].lstrip() for line in block.decode().splitlines() if line.startswith("data:")]
            if lines:
                yield "\n".join(lines)


def _chat_events(data: Any, at_s: float) -> list[Event]:
    """The events of one chunk of chat or of one whole answer; of what is no chat its JSON, without volatile fields."""
    if isinstance(data, Mapping) and data.get("error") is not None:
        return [Event("error", at_s, {"error": _plain(data["error"])})]
    if not isinstance(data, Mapping) or "choices" not in data:
        return [Event("other", at_s, {"content": _plain(data)})]
    events = [event for choice in data["choices"] for event in _choice_events(choice, data, at_s)]
    if data.get("usage") and (not events or data.get("object") == "chat.completion"):
        events.append(Event("usage", at_s, {"usage": data["usage"]}))
    return events


def _choice_events(choice: Mapping[str, Any], data: Mapping[str, Any], at_s: float) -> list[Event]:
    """Streamed, a chunk names its modality, and audio stands where text would; a whole answer's message has both."""
    part: Mapping[str, Any] = choice.get("delta") or choice.get("message") or {}
    content, audio, modality = part.get("content"), part.get("audio"), data.get("modality")
    common = {"index": choice.get("index"), "finish_reason": choice.get("finish_reason")}
    if modality == "audio":
        said = {"modality": modality, "usage": data.get("usage"), **common}
        return [Event("audio", at_s, said, base64.b64decode(content or ""))]
    events = []
    if isinstance(content, list):  # images
        events.append(Event("other", at_s, {"content": _plain(content), **common}))
    elif content is not None or audio is None:
        text = {"text": content, "token_ids": choice.get("token_ids")}
        events.append(Event("text", at_s, {"modality": modality or "text", **text, **common}))
    if audio is not None:
        said = {"modality": "audio", "metadata": choice.get("audio_metadata"), **common}
        events.append(Event("audio", at_s, said, base64.b64decode(audio.get("data") or "")))
    return events


class Client:
    """Sends requests to one server and records the answers; an async context manager."""

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._started = 0

    async def __aenter__(self) -> Client:  # noqa: PYI034 - Self came with 3.11
        # One connection per request, as a benchmark's clients have: no waiting for a pool.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=1 << 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request) -> Capture:
        """Send one request and record it to its end, its abort or its error."""
        if self._session is None:
            raise RuntimeError("use the client inside `async with`")
        capture = Capture(request, self._started, time.monotonic())
        self._started += 1
        try:
            async with self._session.post(self._base_url + request.path, json=dict(request.body)) as response:
                capture.status = response.status
                if response.status != 200:
                    await self._read_error(capture, response)
                elif "event-stream" in response.headers.get("Content-Type", ""):
                    await self._read_events(capture, response)
                else:
                    await self._read_body(capture, response)
        except (aiohttp.ClientError, asyncio.TimeoutError, UnicodeDecodeError, ValueError) as error:
            capture.error = f"{type(error).__name__}: {error}"
        capture.e2e_s = time.monotonic() - capture.started_at_s
        return capture

    @staticmethod
    def _keep(capture: Capture, event: Event) -> bool:
        """Record *event*; True when the request asked to stop here."""
        capture.events.append(event)
        if event.kind == "error":
            capture.fail(event.content["error"])
        limit = capture.request.abort_after
        capture.aborted = limit is not None and len(capture.events) >= limit
        return capture.aborted

    async def _read_events(self, capture: Capture, response: aiohttp.ClientResponse) -> None:
        async for data in _server_sent_events(response.content):
            at_s = time.monotonic() - capture.started_at_s
            if data == "[DONE]":
                capture.events.append(Event("done", at_s, {}))
                continue
            for event in _chat_events(json.loads(data), at_s):
                if self._keep(capture, event):
                    response.close()
                    return
        if not capture.events or (capture.events[-1].kind != "done" and capture.error is None):
            capture.error = "the event stream ended without [DONE]"

    async def _read_body(self, capture: Capture, response: aiohttp.ClientResponse) -> None:
        """A whole JSON answer, or a byte stream of audio."""
        kind = response.headers.get("Content-Type", "").split(";")[0]
        if kind == "application/json":
            for event in _chat_events(await response.json(), time.monotonic() - capture.started_at_s):
                self._keep(capture, event)
            return
        async for piece in response.content.iter_any():
            at_s = time.monotonic() - capture.started_at_s
            if piece and self._keep(capture, Event("audio", at_s, {"modality": "audio", "type": kind}, piece)):
                response.close()
                return

    @staticmethod
    async def _read_error(capture: Capture, response: aiohttp.ClientResponse) -> None:
        text = await response.text()
        try:
            data = json.loads(text)
        except ValueError:
            data = text
        capture.error_code = response.status
        capture.fail(data.get("error", data) if isinstance(data, Mapping) else data)

    async def run_closed_loop(self, requests: Sequence[Request], max_concurrency: int) -> list[Capture]:
        """Keep *max_concurrency* requests in flight, started in the given order, until all are answered.

        Captures come back in the order of *requests*.
        """
        captures: list[Capture | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))

        async def worker() -> None:
            for index, request in waiting:
                captures[index] = await self.send(request)

        await asyncio.gather(*(worker() for _ in range(min(max_concurrency, len(requests)))))
        return [capture for capture in captures if capture is not None]

    async def run_arrivals(self, requests: Sequence[Request], starts_s: Sequence[float]) -> list[Capture]:
        """Start each request so many seconds from now; captures in the order of *requests*.

        Two servers get the same arrivals. In a closed loop the one that answers sooner also gets more to do.
        """
        begun = time.monotonic()

        async def start(request: Request, start_s: float) -> Capture:
            await asyncio.sleep(begun + start_s - time.monotonic())
            return await self.send(request)

        return list(await asyncio.gather(*map(start, requests, starts_s)))


def run_closed_loop(
    base_url: str, requests: Sequence[Request], max_concurrency: int = 1, *, headers: Mapping[str, str] | None = None
) -> list[Capture]:
    """`Client.run_closed_loop` for code that is not asynchronous."""
    return _run(base_url, headers, lambda client: client.run_closed_loop(requests, max_concurrency))


def run_arrivals(base_url: str, requests: Sequence[Request], starts_s: Sequence[float]) -> list[Capture]:
    """`Client.run_arrivals` for code that is not asynchronous."""
    return _run(base_url, None, lambda client: client.run_arrivals(requests, starts_s))


def _run(
    base_url: str, headers: Mapping[str, str] | None, load: Callable[[Client], Awaitable[list[Capture]]]
) -> list[Capture]:
    async def run() -> list[Capture]:
        async with Client(base_url, headers=headers) as client:
            return await load(client)

    return asyncio.run(run())


def differences(ours: Sequence[Capture], theirs: Sequence[Capture]) -> list[str]:
    """Where two runs of the same requests disagree, one line each; empty when they agree."""
    return answers_differ([each.answer() for each in ours], [each.answer() for each in theirs])


def answers_differ(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same of what `Capture.answer` said, for whoever could not keep the captures."""
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} captures against {len(theirs)}"]
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        unequal = [key for key in {**mine, **other} if mine.get(key) != other.get(key)]
        found += [f"request {index}: {key}: {mine.get(key)!r} against {other.get(key)!r}" for key in unequal]
    return found
