"""Send requests of every kind to stock and to fastpath, and compare the answers byte by byte.

    python -m benchmarks.trust.parity [MODEL ...]

It runs Qwen3-Omni with two replicas per stage, then Qwen3-TTS, on the simulated device. API server, orchestrator,
schedulers, connectors and stage processes are real, and only the device is a clock. Both arms get the same requests.
The first part has requests whose answers depend only on the request. Then the counters of ``/metrics`` are read. The
last part has clients that leave, requests that upstream does not count reliably, and others that stay. If fastpath
differs, stock is started once more, and a request differs only if its answer differs from that of every start of stock.
Upstream loses the end of some answers with audio alone (``docs/upstream-defects.md``). Requests whose answer stock lost
in this way cannot be compared and are counted separately.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp
from rich.console import Console

from benchmarks.rigs import about, results, server_arms, side_by_side, whole_server
from benchmarks.rigs.arm import FASTPATH, STOCK, Arm
from benchmarks.rigs.captures import in_flight
from benchmarks.rigs.side_by_side import guarded, positive
from benchmarks.trust import FLAT, kinds
from benchmarks.trust.kinds import Asked, Kinds

STREAMS = 6
STEPS_MS = {"thinker": 12, "talker": 10, "qwen3_tts": 3, "code2wav": 5}
STAGES = {"*": FLAT, **{name: {"base_ms": ms} for name, ms in STEPS_MS.items()}}
"""Step times that stock sustains on two cores. With shorter ones it loses audio."""
LOST = "without the end of its audio"


@dataclass(frozen=True)
class Model:
    """A model, and the requests that it gets.

    Attributes:
        name: One of `omni_simulated_device.models`.
        deploy: One of the simulated device's deploy YAMLs.
        stages: Number of stages.
        replicas: Number of replicas of each stage.
        alone: Requests that are sent one at a time.
        certain: Requests whose answers and counters depend only on the request.
        last: Requests that are sent after the counters were read.
        event_driven: Whether the orchestrator runs event-driven, as upstream's default for this model.
        arguments: Further arguments of ``vllm serve``.
    """

    name: str
    deploy: str
    stages: int
    replicas: int
    alone: Kinds
    certain: Kinds
    last: Kinds
    event_driven: bool = False
    arguments: tuple[str, ...] = ()

    def asked(self, count: int, name: str) -> list[tuple[list[Asked], int]]:
        """*count* requests in three parts, each with the number of requests in flight at a time."""
        alone = kinds.asked(self.alone, count // 20 if self.alone else 0, name)
        last = kinds.asked(self.last, count // 6, name, seed=1)
        return [(alone, 1), (kinds.asked(self.certain, count - len(alone) - len(last), name), STREAMS), (last, STREAMS)]


OMNI = Model(
    "qwen3_omni",
    "qwen3_omni_2x.yaml",
    stages=3,
    replicas=2,
    alone=kinds.ALONE,
    certain=kinds.OMNI,
    last={**kinds.LEFT, **kinds.STOPPED, **kinds.AUDIO, **kinds.BOTH},
    arguments=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
SPEECH = Model(
    "qwen3_tts",
    "qwen3_tts.yaml",
    stages=2,
    replicas=1,
    alone={},
    certain=kinds.SPEECHES,
    last={**kinds.LEFT_SPEECHES, **kinds.STREAMED_SPEECHES},
    event_driven=True,
)
MODELS = {model.name: model for model in (OMNI, SPEECH)}


# ---- What a server answered ----


@dataclass(frozen=True)
class Answer:
    """The answer to a request.

    Attributes:
        status: The HTTP status. None if there was no answer.
        headers: The headers without the date.
        events: The result of `alike`, in order: events, messages, a whole body, or blocks of a stream of bytes.
        ended: A transport error, or `LOST`. Empty if the answer is complete.
    """

    status: int | None
    headers: tuple[tuple[str, str], ...]
    events: Mapping[str, Sequence[bytes]]
    ended: str


_DRAWN = re.compile(rb'("(?:id|item_id|request_id|response_id)": ?")([^"]+)"')
_CLOCK = re.compile(rb'("(?:created|created_at|expires_at|completed_at)": ?)[0-9.]+')
_OGG = re.compile(rb"(OggS.{10}).{4}(.{4}).{4}", re.DOTALL)
_SOURCE = re.compile(rb'"modality": ?"(\w+)"|"type": ?"(transcription|response)\.')
_SO_FAR = re.compile(rb'("usage":\{"prompt_tokens":)\d+(,"total_tokens":)\d+(,"completion_tokens":0\})')
_PROMPT = re.compile(rb'("(?:input|total)_tokens": ?)\d+')
_ENDED = re.compile(rb'"finish_reason":"(\w+)"')
_BLOCK = 4096
_LONG = 1500


def alike(asked: Asked, events: Sequence[bytes]) -> dict[str, list[bytes]]:
    """The events of an answer by the stage that sent them ("" for none), without what differs in every run.

    Identifiers are drawn for each request. Each one is replaced by the number of its first occurrence, so that all
    occurrences must still be equal. The serial number and the check sums of an Ogg stream are removed. Times of
    creation and expiry are set to 0.

    Text and audio come from different stages, and their order depends on timing, on stock too. Therefore, if audio was
    requested, events are compared stage by stage and not how they interleave. Three fields depend on that order and are
    made equal. ``metrics`` of an event are null instead of {} once a stage has ended, audio events repeat the length of
    the prompt once text was sent, and the finish reason is in the stage that ends last. ``/v1/responses`` counts the
    prompt of the output that came last: the audio's has six tokens more than the text's, and on a busy stock server the
    text may be last. So its counts with the prompt in them are set to 0.

    All other bytes are unchanged. The middle of a long event is replaced by its digest.
    """
    seen: dict[bytes, bytes] = {}
    body = asked.body if isinstance(asked.body, dict) else {}
    modalities = body.get("modalities") or ()

    def number(match: re.Match[bytes]) -> bytes:
        return match[1] + seen.setdefault(match[2], b"%d" % len(seen)) + b'"'

    found: dict[str, list[bytes]] = defaultdict(list)
    for event in events:
        same = _CLOCK.sub(rb"\g<1>0", _DRAWN.sub(number, event))
        if same.startswith(b"OggS"):
            same = _OGG.sub(rb"\1\2", same)
        if asked.path == "/v1/responses":
            same = _PROMPT.sub(rb"\g<1>0", same)
        said = _SOURCE.search(same)
        source = (said[1] or said[2]) if said else b""
        if "audio" in modalities and source:
            same = same.replace(b'"metrics":{}', b'"metrics":null')
            if source == b"audio":
                same = _SO_FAR.sub(rb"\g<1>0\g<2>0\g<3>", same)
            if "text" in modalities and _ENDED.search(same):
                found["finish reason"].append(b"one")
                same = _ENDED.sub(b'"finish_reason":null', same)
        found[source.decode()].append(_short(same))
    return dict(found)


def _short(event: bytes) -> bytes:
    if len(event) < _LONG:
        return event
    digest = hashlib.sha256(event).hexdigest().encode()
    return b"%b ... %d bytes, SHA-256 %b ... %b" % (event[:300], len(event), digest, event[-300:])


async def ask(to: aiohttp.ClientSession, asked: Asked) -> Answer:
    """Send a request and read its answer to the end, or until the client leaves."""
    status, headers, body, ended = None, {}, bytearray(), ""
    if isinstance(asked.body, list):
        return await _talk(to, asked)
    sent = {"data": asked.body} if isinstance(asked.body, bytes) else {"json": asked.body}
    stays = aiohttp.ClientTimeout(asked.leaves) if asked.leaves and asked.leaves < 1 else to.timeout
    try:
        method = "GET" if asked.body is None else "POST"
        async with to.request(
            method, asked.path, timeout=stays, headers={"Content-Type": "application/json"}, **sent
        ) as response:
            status, headers = response.status, dict(response.headers)
            async for data in response.content.iter_any():
                body += data
                if asked.leaves and asked.leaves >= 1 and len(body) >= asked.leaves:
                    break
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        ended = type(error).__name__
    headers.pop("Date", None)
    whole, kind = bytes(body), headers.get("Content-Type", "")
    if "event-stream" in kind:
        events = whole.split(b"\n\n")
    elif asked.leaves is None:
        events = [whole, b""]
    else:
        events = [whole[start : start + _BLOCK] for start in range(0, len(whole) + 1, _BLOCK)]
    # The rest after the last separator is empty, or incomplete if the client left.
    rest = events.pop()
    if rest and asked.leaves is None:
        ended = ended or f"unfinished: {rest[:80]!r}"
    if asked.kind in kinds.AUDIO and not any(map(_ends_audio, events)):
        ended = ended or LOST
    return Answer(status, tuple(sorted(headers.items())), alike(asked, events), ended)


def _ends_audio(event: bytes) -> bool:
    return b'"audio":{' in event or (b'"modality":"audio"' in event and bool(_ENDED.search(event)))


_LAST = ("response.output_audio.done", "error")
"""The last messages over a realtime socket. The client closes it after one of them."""


async def _talk(to: aiohttp.ClientSession, asked: Asked) -> Answer:
    frames: list[bytes] = []
    ended = ""
    try:
        async with to.ws_connect(asked.path, max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_receive=120)) as socket:
            for message in asked.body:
                await socket.send_str(message if isinstance(message, str) else json.dumps(message))
            async for frame in socket:
                frames.append(frame.data if isinstance(frame.data, bytes) else frame.data.encode())
                if asked.path == "/v1/realtime" and json.loads(frame.data).get("type") in _LAST:
                    break
            frames.append(b"closed with %d" % (socket.close_code or 0))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        ended = type(error).__name__
    return Answer(101, (), alike(asked, frames), ended)


def run(url: str, asked: Sequence[Asked], streams: int = STREAMS) -> list[Answer]:
    """The answers of a server, in the order of the requests, with *streams* requests in flight at a time."""
    return in_flight(url, asked, streams, ask)


def unlike(asked: Asked, ours: Answer, theirs: Answer) -> str:
    """The first difference of two answers to a request, or "".

    If the client leaves, the shorter list of events of each stage must be a prefix of the other one, because their
    number depends on timing.
    """
    if asked.leaves is None:
        for name in ("status", "headers", "ended"):
            if getattr(ours, name) != getattr(theirs, name):
                return f"{name}: {getattr(ours, name)!r} against {getattr(theirs, name)!r}"
    for source in sorted(ours.events.keys() | theirs.events.keys()):
        mine, other = ours.events.get(source, ()), theirs.events.get(source, ())
        for place, (one, two) in enumerate(zip(mine, other, strict=False)):
            if one != two:
                return f"{source} event {place}: {one!r} against {two!r}"
        if asked.leaves is None and len(mine) != len(other):
            return f"{source} events: {len(mine)} against {len(other)}; last {mine[-1:]!r} against {other[-1:]!r}"
    return ""


def differences(asked: Sequence[Asked], ours: Sequence[Answer], theirs: Sequence[Answer]) -> list[str]:
    """The differences between answers to the same requests, one line each."""
    said = [(each[0].kind, unlike(*each)) for each in zip(asked, ours, theirs, strict=True)]
    return [f"{kind}: {words}" for kind, words in said if words]


# ---- What a server counted ----

_COUNTED = re.compile(r"^(vllm\S*(?:_total|_count))(\{.*\})? (\S+)$")
_REPLICA = re.compile(r'(engine|replica|replica_id)="\d+",?')
_OMNI_TOKENS = ("vllm_omni:generation_tokens", "vllm_omni:prompt_tokens")
_RACES = ("transfer_rx_s", "transfer_in_flight_s", "stage_gen_time_s", *_OMNI_TOKENS)
"""Counters that differ between two runs of stock. Upstream counts a transfer only if the front end processes the end of
a stage before the orchestrator has deleted the request's replica: 3 of 19 in one run of stock, and 19 with a front end
that messages woke. It misses tokens if two messages of a request have the same ``id()``, by which it
recognizes messages that it has counted. Two starts of stock counted 113,412 and 113,931 tokens of the same answers, and
fastpath 114,908. The counters of each stage (``vllm:generation_tokens_total``) are compared."""
_TIMED = ("audio_continuity",)
"""Counters of what was sent in time."""
_BATCHING = ("iteration_tokens", "inter_token_latency", "num_preemptions", "prefix_cache", "mm_cache", "engine_steps")


def scrape(url: str) -> list[str]:
    """The lines of a server's ``/metrics``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310
        text: str = response.read().decode()
    return text.splitlines()


def counts(lines: Sequence[str]) -> dict[str, float]:
    """Upstream's counters, summed over replicas, without those that depend on batches or timing."""
    left_out = _BATCHING + _RACES + _TIMED
    found: dict[str, float] = defaultdict(float)
    for match in filter(None, map(_COUNTED.match, lines)):
        if not any(word in match[1] for word in left_out):
            found[match[1] + _REPLICA.sub("", match[2] or "")] += float(match[3])
    return dict(found)


def unequal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, tuple[float | None, float | None]]:
    """Counters that differ, or are missing in one of the two."""
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


# ---- The program ----

COLUMNS = ("requests", "refused", "audio lost by stock", "by fastpath", "stock unlike stock", "no end", "differ")


@dataclass(frozen=True)
class Start:
    """The answers of one start of an arm, and its counters before the last part."""

    answers: Sequence[Answer]
    counters: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms of each model. 0: no difference, 1: a difference or a failure, 2: usage, 130: interrupted."""
    parser = side_by_side.parser("benchmarks.trust.parity", __doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL", help="default both")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="of each start (default 200)")
    options = parser.parse_args(argv)
    about.commit()  # read now, because a commit may follow during the run
    models = [MODELS[name] for name in options.models or MODELS]

    def run_all(console: Console) -> int:
        unlike = [_pair(model, options.requests, console) for model in models]
        return 1 if any(unlike) else 0

    return guarded("The parity run", run_all)


def _pair(model: Model, count: int, console: Console) -> list[str]:
    """The differences between a start of each arm, after a second start of stock if there are any."""
    parts = model.asked(count, str(whole_server.model_folder(model.name)))
    asked = [each for part, _ in parts for each in part]
    stock, fast = [_start(model, STOCK, parts)], _start(model, FASTPATH, parts)
    rows, said = compare(asked, fast, stock)
    if said:
        stock.append(_start(model, STOCK, parts))
        rows, said = compare(asked, fast, stock)
    rows["all"] = sum(rows.values(), Counter())
    table = [[kind, *(str(row[column]) for column in COLUMNS)] for kind, row in rows.items()]
    results.save("trust-parity", {"model": model.name, "starts of stock": len(stock), "kinds": rows, "differ": said})
    results.show(f"{model.name}; {len(fast.counters)} counters of /metrics compared", ("kind", *COLUMNS), table)
    for line in said:
        console.print(f"DIFFERENT: {line[:_LONG]}", markup=False, highlight=False)
    return said


def _start(model: Model, arm: Arm, parts: Sequence[tuple[Sequence[Asked], int]]) -> Start:
    """One start of the arm's server, which is checked to be the arm before and after the requests."""
    begun = time.monotonic()

    def tell(words: str) -> None:
        results.progress(f"{time.monotonic() - begun:4.0f} s, {model.name}, {arm.name}: {words}")

    arm = replace(arm, event_driven=model.event_driven, arguments=model.arguments)
    log = results.FOLDER.resolve() / "parity-logs" / f"{model.name}-{arm.name}.log"
    server = whole_server.server(arm, model.name, model.deploy, {"stages": STAGES}, log_path=log)
    roles = server_arms.roles(model.stages, model.replicas)
    answers: list[Answer] = []
    counters: dict[str, float] = {}
    tell("starts")
    with server:
        server_arms.prove(server, arm, roles)
        for part, streams in parts:
            if part is parts[-1][0]:
                time.sleep(3)  # metrics of the last requests
                counters = counts(scrape(server.url))
            tell(f"{len(part)} requests, {streams} at a time")
            answers += run(server.url, part, streams)
        tell("all answered")
        time.sleep(server_arms.STATE_FILES_SETTLE_S)
        found = server_arms.prove(server, arm, roles)["api"].patches
    if arm.on:
        server_arms.check_engaged({name: each.counters or {} for name, each in found.items()}, len(parts[1][0]) // 2)
    return Start(answers, counters)


def compare(asked: Sequence[Asked], fast: Start, stock: Sequence[Start]) -> tuple[dict[str, Counter[str]], list[str]]:
    """The counts of `COLUMNS` for each kind of request, and the differences from every start of stock."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    said: list[str] = []
    for index, one in enumerate(asked):
        row, ours, theirs = rows[one.kind], fast.answers[index], [start.answers[index] for start in stock]
        is_lost = [each.ended == LOST for each in theirs]
        row["requests"] += 1
        row["refused"] += (theirs[0].status or 0) >= 400
        row["audio lost by stock"] += is_lost[0]
        row["by fastpath"] += ours.ended == LOST
        row["stock unlike stock"] += bool(unlike(one, theirs[-1], theirs[0]))
        row["no end"] += bool(ours.ended) and ours.ended != LOST and one.leaves is None
        if not all(is_lost) and all(words := [unlike(one, ours, each) for each in theirs]):
            row["differ"] += 1
            said.append(f"request {index}, {one.kind}: {words[0]}")
    counters = min((unequal(fast.counters, each.counters) for each in stock), key=len)
    return rows, said + [f"{name}: {two}" for name, two in counters.items()]


if __name__ == "__main__":
    sys.exit(main())
