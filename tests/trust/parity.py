"""``python -m tests.trust.parity [MODEL ...]``: requests of every kind to stock and to fastpath, compared byte by byte.

Qwen3-Omni with two replicas a stage, then Qwen3-TTS, on the simulated device: API server, orchestrator, schedulers,
connectors and stage processes are real; only the device is a clock. Both arms get the same: requests whose answers
follow from what was asked; then the counters of ``/metrics`` are read; then come clients that leave, requests of which
upstream counts by chance, and others that stay. Where fastpath differs stock is started once more: a request differs if
no start of stock answered so. Upstream loses the end of some answers for audio alone (``docs/upstream-defects.md``):
where stock did, there is nothing to compare with, and it is counted apart.
"""

from __future__ import annotations

import argparse
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

from benchmarks.rigs import about, results, server_arms, user_arms, whole_server
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.arms import FASTPATH, STOCK
from benchmarks.rigs.captures import in_flight
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import guarded, positive
from tests.trust import kinds
from tests.trust.kinds import Asked, Kinds

STREAMS = 6
STAGES = {name: {"base_ms": ms} for name, ms in (("thinker", 12), ("talker", 10), ("qwen3_tts", 3), ("code2wav", 5))}
"""What stock sustains on two cores. Beyond that it loses audio."""
LOST = "without the end of its audio"


@dataclass(frozen=True)
class Model:
    """A model, and what is asked of it.

    Attributes:
        name: One of `omni_simulated_device.models`.
        deploy: Which of the simulated device's deploy YAMLs.
        stages: How many.
        replicas: Of each stage.
        alone: What is asked one at a time.
        certain: Whose answers follow from what was asked, and what is counted of them.
        last: What is asked when the counters have been read.
        event_driven: Whether the orchestrator runs as upstream's default for this model has it.
        arguments: Of ``vllm serve``.
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
        """So many requests in three parts, each with how many are under way at a time."""
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
    """What came back for a request.

    Attributes:
        status: Of HTTP; None: there was no answer.
        headers: Of the answer, without its date.
        events: What came, in order, as `alike` has it: events, messages, a whole body, or blocks of a stream of bytes.
        ended: How it ended, if not as it should: an error of the transport, or `LOST`.
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
_ENDED = re.compile(rb'"finish_reason":"(\w+)"')
_BLOCK = 4096
_LONG = 1500


def alike(asked: Asked, events: Sequence[bytes]) -> dict[str, list[bytes]]:
    """What came for a request, by the stage that it is of ("" for none), with nothing else made alike than this.

    Identifiers are drawn for each request: each becomes the number of its first appearance, so that it must still be
    the same one throughout. So is an Ogg stream's serial number, which its pages' check sums cover. Times of creation
    and expiry are the clock's.

    Text and audio come from different stages, and which is ahead is a matter of time, on stock too. So where audio was
    asked for, their events are compared stage by stage, not how they interleave, and three fields that tell who was
    ahead are made alike: an event's ``metrics`` are null instead of {} once any stage has ended, audio events repeat
    the length of the prompt once text has come, and of text and audio the one that ends last has the finish reason.

    All other bytes stay; what is long has its digest in place of its middle.
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
    """Send a request and read its answer to the end, or as long as the client stays."""
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
    # What follows the last separator is nothing, or cut where the client left.
    rest = events.pop()
    if rest and asked.leaves is None:
        ended = ended or f"unfinished: {rest[:80]!r}"
    if asked.kind in kinds.AUDIO and not any(map(_ends_audio, events)):
        ended = ended or LOST
    return Answer(status, tuple(sorted(headers.items())), alike(asked, events), ended)


def _ends_audio(event: bytes) -> bool:
    return b'"audio":{' in event or (b'"modality":"audio"' in event and bool(_ENDED.search(event)))


_LAST = ("response.output_audio.done", "error")
"""After which nothing more comes over a realtime socket, which the client closes."""


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
    """What a server answers, in the order of the requests, of which so many are under way at a time."""
    return in_flight(url, asked, streams, ask)


def unlike(asked: Asked, ours: Answer, theirs: Answer) -> str:
    """Where two answers to a request differ first, or "".

    Of a client that leaves, each stage's events must begin alike: how many have come by then is a matter of time.
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
    """Where answers to the same requests differ, one line each."""
    said = [(each[0].kind, unlike(*each)) for each in zip(asked, ours, theirs, strict=True)]
    return [f"{kind}: {words}" for kind, words in said if words]


# ---- What a server counted ----

_COUNTED = re.compile(r"^(vllm\S*(?:_total|_count))(\{.*\})? (\S+)$")
_REPLICA = re.compile(r'(engine|replica|replica_id)="\d+",?')
_OMNI_TOKENS = ("vllm_omni:generation_tokens", "vllm_omni:prompt_tokens")
_RACES = ("transfer_rx_s", "transfer_in_flight_s", "stage_gen_time_s", *_OMNI_TOKENS)
"""Counts that differ between two runs of stock. The transfers are counted only if the front end hears of a stage's end
before the orchestrator has forgotten the request's replica, which the wake-up does more often (19 of 19 in one run,
where stock counted 3). The others are missed when a request's messages happen to share an ``id()``, by which upstream
remembers what it has counted: two starts of stock counted 113,412 and 113,931 tokens of the same answers, and fastpath
114,908; what each stage counts (``vllm:generation_tokens_total``) is compared."""
_TIMED = ("audio_continuity",)
"""Counts of what came in time."""
_BATCHING = ("iteration_tokens", "inter_token_latency", "num_preemptions", "prefix_cache", "mm_cache", "engine_steps")


def scrape(url: str) -> list[str]:
    """The lines of a server's ``/metrics``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:  # noqa: S310
        text: str = response.read().decode()
    return text.splitlines()


def counts(lines: Sequence[str]) -> dict[str, float]:
    """Upstream's counters that say how many, without those that say in how many batches; replicas added up."""
    left_out = _BATCHING + _RACES + _TIMED
    found: dict[str, float] = defaultdict(float)
    for match in filter(None, map(_COUNTED.match, lines)):
        if not any(word in match[1] for word in left_out):
            found[match[1] + _REPLICA.sub("", match[2] or "")] += float(match[3])
    return dict(found)


def unequal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, tuple[float | None, float | None]]:
    """Counters that are not the same in both, or missing in one."""
    names = sorted(ours.keys() | theirs.keys())
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


# ---- The program ----

COLUMNS = ("requests", "refused", "audio lost by stock", "by fastpath", "stock unlike stock", "no end", "differ")


@dataclass(frozen=True)
class Start:
    """What a start of an arm showed: its answers, and its counters before the last part."""

    answers: Sequence[Answer]
    counters: Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Ask both arms of each model; 0: alike, 1: not, or it could not be seen, 2: usage, 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.trust.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL", help="default both")
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="of each start (default 200)")
    options = parser.parse_args(argv)
    about.commit()  # of the code that runs, whatever is committed meanwhile
    models = [MODELS[name] for name in options.models or MODELS]

    def run_all(console: Console) -> int:
        unlike = [_pair(model, options.requests, console) for model in models]
        return 1 if any(unlike) else 0

    return guarded("The parity run", run_all)


def _pair(model: Model, count: int, console: Console) -> list[str]:
    """A start of each arm, and one more of stock where they differ; the differences."""
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
    """What a start of the arm's server showed; it is proved to be the arm before the requests and after them."""
    begun = time.monotonic()

    def tell(words: str) -> None:
        results.progress(f"{time.monotonic() - begun:4.0f} s, {model.name}, {arm.name}: {words}")

    server = Server(
        whole_server.model_folder(model.name),
        whole_server.deploy(model.deploy),
        environment=whole_server.environment(replace(arm, event_driven=model.event_driven), STAGES),
        arguments=model.arguments,
        log_path=results.FOLDER.resolve() / "parity-logs" / f"{model.name}-{arm.name}.log",
    )
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
        user_arms.check_engaged({}, {name: each.counters or {} for name, each in found.items()}, len(parts[1][0]) // 2)
    return Start(answers, counters)


def compare(asked: Sequence[Asked], fast: Start, stock: Sequence[Start]) -> tuple[dict[str, Counter[str]], list[str]]:
    """How many requests of each kind did what `COLUMNS` says, and what fastpath did as no start of stock did."""
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
