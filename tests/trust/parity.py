"""``python -m tests.trust.parity``: the same requests of every kind to stock and to fastpath, compared byte by byte.

Qwen3-Omni with two replicas a stage, then Qwen3-TTS, on the simulated device: API server, orchestrator, schedulers,
connectors and stage processes are real; only the device is a clock. First come requests whose answers follow from what
was asked, then the counters of ``/metrics``, then clients that leave among others that stay. Every start gets the same
requests. Where fastpath differs stock is started once more: a request differs if no start of stock answered so.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import re
import sys
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from benchmarks.rigs import server_arms, user_arms, whole_server
from benchmarks.rigs.about import about, commit
from benchmarks.rigs.arm import Arm, turns
from benchmarks.rigs.arms import STOCK
from benchmarks.rigs.captures import in_flight
from benchmarks.rigs.side_by_side import guarded, positive, served, work_folder
from omni_fastpath.tools.ab.phases import Phases
from tests.trust import kinds
from tests.trust.kinds import Asked

STREAMS = 6
STEP_MS = {"thinker": 6.0, "talker": 5.0, "qwen3_tts": 3.0, "code2wav": 3.0}
"""Fixed part of a step, milliseconds: what stock bears on two cores. Where it does not, it loses audio by itself: a
request for audio alone ends with the thinker's terminal output, and what the last stage has made by then is dropped."""

WAIT_S = 10
"""How long a stage waits for its input before upstream gives the request up (upstream: 600)."""

_PHASES_A_START = 6
_MINUTES_A_START = 2.0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and what is asked of it.

    Attributes:
        name: One of `omni_simulated_device.models`.
        deploy: Which of the simulated device's deploy YAMLs.
        stages: How many.
        replicas: Of each stage.
        event_driven: Whether the orchestrator runs as upstream's default for this model has it.
        arguments: Of ``vllm serve``.
        certain: Whose answers follow from what was asked.
        alone: Whose answers do so while nothing else is under way.
        left: What clients ask who leave.
        hung: What upstream itself ends by a timeout.
    """

    name: str
    deploy: str
    stages: int
    replicas: int
    event_driven: bool
    arguments: tuple[str, ...]
    certain: kinds.Kinds
    alone: kinds.Kinds
    left: kinds.Kinds
    hung: kinds.Kinds

    def asked(self, count: int, name: str) -> list[tuple[list[Asked], int]]:
        """So many requests in three parts, each with how many are under way at a time.

        Those that are sent one at a time; the other certain ones; those that leave, as many that stay, what hangs.
        """
        leave = kinds.asked(self.left, count // 25, name, kinds.AFTER)
        stay = kinds.asked(self.certain, len(leave), name)
        hang = kinds.asked(self.hung, count // 100 if self.hung else 0, name)
        alone = kinds.asked(self.alone, count // 20 if self.alone else 0, name)
        last = [*hang, *(each for pair in zip(leave, stay, strict=True) for each in pair)]
        certain = kinds.asked(self.certain, count - len(alone) - len(last), name)
        return [(alone, 1), (certain, STREAMS), (last, STREAMS)]


MODELS = (
    Model(
        "qwen3_omni",
        "qwen3_omni_2x.yaml",
        3,
        2,
        event_driven=False,
        arguments=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        certain=kinds.OMNI,
        alone=kinds.OMNI_ALONE,
        left=kinds.LEFT,
        hung=kinds.STOPPED_ALOUD,
    ),
    Model(
        "qwen3_tts",
        "qwen3_tts.yaml",
        2,
        1,
        event_driven=True,
        arguments=(),
        certain=kinds.SPEECHES,
        alone={},
        left=kinds.LEFT_SPEECHES,
        hung={},
    ),
)


# ---- What a server answered ----


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for a request.

    Attributes:
        status: Of HTTP; None: there was no answer.
        headers: Of the answer, without its date.
        events: What came, in order, as `alike` has it: events, messages, a whole body, or blocks of a stream of bytes.
        ended: How the transport ended it, if not as it should.
    """

    status: int | None
    headers: tuple[tuple[str, str], ...]
    events: Mapping[str, Sequence[bytes]]
    ended: str


_DRAWN = re.compile(rb'("(?:id|item_id|request_id|response_id)": ?")([^"]+)"')
_CLOCK = re.compile(rb'("(?:created|created_at|expires_at|completed_at)": ?)[0-9.]+')
_SOURCE = re.compile(rb'"modality": ?"(\w+)"|"type": ?"(transcription|response)\.')
_SO_FAR = re.compile(rb'("usage":\{"prompt_tokens":)\d+(,"total_tokens":)\d+(,"completion_tokens":0\})')
_ENDED = re.compile(rb'"finish_reason":"(\w+)"')
_BLOCK = 4096
_LONG = 1500


def alike(asked: Asked, events: Sequence[bytes]) -> dict[str, list[bytes]]:
    """What came for a request, by the stage that it is of ("" for none), with nothing else made alike than this.

    Identifiers are drawn for each request: each becomes the number of its first appearance, so that it must still be
    the same one throughout. Times of creation and expiry are the clock's.

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
    elif "json" in kind or asked.leaves is None:
        events = [whole, b""]
    else:
        events = [whole[start : start + _BLOCK] for start in range(0, len(whole) + 1, _BLOCK)]
    # What follows the last separator is nothing, or cut where the client left.
    rest = events.pop() if events else b""
    if rest and asked.leaves is None:
        ended = ended or f"unfinished: {rest[:80]!r}"
    return Answer(status, tuple(sorted(headers.items())), alike(asked, events), ended)


_LAST = ("response.output_audio.done", "error")
"""After which nothing more comes over a realtime socket, which the client closes."""


async def _talk(to: aiohttp.ClientSession, asked: Asked) -> Answer:
    frames: list[bytes] = []
    ended = ""
    try:
        async with to.ws_connect(asked.path, max_msg_size=0) as socket:
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


# ---- What a server counted ----

_COUNTED = re.compile(r"^(vllm\S*(?:_total|_count))(\{.*\})? (\S+)$")
_REPLICA = re.compile(r'(engine|replica|replica_id)="\d+",?')
_RACES = ("transfer_rx_s", "transfer_in_flight_s", "stage_gen_time_s")
"""Counts that differ between two runs of stock. The transfers are counted only if the front end hears of a stage's end
before the orchestrator has forgotten the request's replica, which the wake-up does more often (19 of 19 in one run,
where stock counted 3). The last is missed when a request's messages happen to share an ``id()``, by which upstream
remembers what it has counted: stock counted 17 of 18 in two of four rounds, fastpath in none of four."""
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


COLUMNS = ("requests", "refused", "stock unlike stock", "without an end", "differ")


@dataclasses.dataclass
class Start:
    """What a start of an arm showed: its answers, and its counters after the first part."""

    arm: str
    answers: list[Answer]
    counters: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms on both models and compare what they answered.

    Returns:
        0: alike. 1: not alike, or it could not be measured. 2: usage. 130: interrupted.
    """
    options = _parser().parse_args(argv)
    return guarded("The parity run", lambda console: _run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.trust.parity", description=__doc__, allow_abbrev=False)
    parser.add_argument("--requests", type=positive, default=200, metavar="N", help="a start (default 200)")
    parser.add_argument("--starts", type=positive, default=1, metavar="N", help="an arm (default 1)")
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="default both")
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="default results/")
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    commit()  # of the code that runs, whatever is committed meanwhile
    arms = [arm for _, arm in turns(user_arms.ARMS, options.starts)]
    output: Path = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    models = [model for model in MODELS if model.name in options.models]
    minutes = len(arms) * len(models) * (_MINUTES_A_START + options.requests / 300)
    console.print(f"{len(arms) * len(models)} starts, about {minutes:.0f} minutes on two cores.", highlight=False)
    phases = Phases(console, len(arms) * len(models) * _PHASES_A_START)
    said: dict[str, Any] = {"about": about(), "requests": options.requests}
    for model in models:
        name = str(whole_server.model_folder(model.name))
        parts = model.asked(options.requests, name)
        asked = [each for part, _ in parts for each in part]
        starts: list[Start] = []
        for place, arm in enumerate([*arms, STOCK], 1):
            if place > len(arms) and not said[model.name]["differ"]:
                break
            log = output / "parity-logs" / f"{model.name}-{place}-{arm.name}.log"
            with work_folder("parity-") as work:
                starts.append(_start(f"{model.name} {place} {arm.name}", arm, model, parts, work, log, phases))
            if place >= len(arms):
                said[model.name] = report(asked, starts)
                (output / "parity.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
                show(console, model.name, said[model.name])
    return 1 if any(said[model.name]["differ"] for model in models) else 0


def _start(
    title: str,
    arm: Arm,
    model: Model,
    parts: Sequence[tuple[Sequence[Asked], int]],
    work: Path,
    log: Path,
    phases: Phases,
) -> Start:
    """What a start of the arm's server showed; it is proved to be the arm before the requests and after them.

    Raises:
        WrongArmError: The server is not what its arm says, or its patches did not take effect.
        ServerError: It did not start, or ended early.
    """
    arm = dataclasses.replace(arm, event_driven=model.event_driven)
    settings = {stage: {"base_ms": step} for stage, step in STEP_MS.items()}
    server = user_arms.server_of(
        arm,
        model.deploy,
        settings,
        work,
        log,
        model=model.name,
        arguments=model.arguments,
        variables={"VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": str(WAIT_S)},
    )
    roles = server_arms.roles(model.stages, model.replicas)
    answers: list[Answer] = []
    counters: dict[str, float] = {}
    with served(server, title, f"{1 + model.stages * model.replicas} processes", phases):
        before = user_arms.prove(server, arm, roles)
        for asked, streams in parts:
            if asked is parts[-1][0]:
                counters = counts(scrape(server.url))
            with phases.phase(f"{title}: {len(asked)} requests, {streams} at a time"):
                answers += run(server.url, asked, streams)
        with phases.phase(f"{title}: proof of the arm after the load"):
            user_arms.prove_after(server, arm, roles, before, len(parts[1][0]) // 2)
    return Start(arm.name, answers, counters)


def report(asked: Sequence[Asked], starts: Sequence[Start]) -> dict[str, Any]:
    """What the starts answered and counted alike and what not, as plain data.

    Returns:
        Each kind's requests, how many of them stock answered with an error, how many had no end on either arm, and
        how many a second start of stock answered unlike the first; then what fastpath did as no start of stock did.
    """
    stock = [start for start in starts if start.arm == STOCK.name]
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    differ: list[str] = []
    varies: list[str] = []
    for index, one in enumerate(asked):
        row, theirs = rows[one.kind], [start.answers[index] for start in stock]
        row["requests"] += 1
        row["refused"] += (theirs[0].status or 0) >= 400
        found = next(filter(None, (unlike(one, each, theirs[0]) for each in theirs[1:])), "")
        row["stock unlike stock"] += bool(found)
        varies += [f"request {index}, {one.kind}, stock: {found[:_LONG]}"] if found else []
        for place, start in enumerate(starts, 1):
            ours = start.answers[index]
            row["without an end"] += bool(ours.ended) and one.leaves is None
            words = [unlike(one, ours, each) for each in theirs]
            if all(words):
                row["differ"] += 1
                differ.append(f"start {place} ({start.arm}), request {index}, {one.kind}: {words[0][:_LONG]}")
    counters = [
        unequal(
            start.counters, min((each.counters for each in stock), key=lambda each: len(unequal(start.counters, each)))
        )
        for start in starts
    ]
    for place, (start, found_unequal) in enumerate(zip(starts, counters, strict=True), 1):
        differ += [f"start {place} ({start.arm}): {name}: {two}" for name, two in found_unequal.items()]
    return {
        "starts": [start.arm for start in starts],
        "kinds": {kind: {column: row[column] for column in COLUMNS} for kind, row in rows.items()},
        "counters": len(stock[0].counters),
        "counters of stock unlike stock": [unequal(each.counters, stock[0].counters) for each in stock[1:]],
        "differ": differ,
        "stock unlike stock": varies,
    }


def show(console: Console, model: str, said: Mapping[str, Any]) -> None:
    """Print a model's part of the report as a table of Markdown."""
    console.print(f"\n{model}: {', '.join(said['starts'])}", highlight=False)
    console.print(f"| kind | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}", markup=False, highlight=False)
    for kind, row in said["kinds"].items():
        line = " | ".join(str(row[column]) for column in COLUMNS)
        console.print(f"| {kind} | {line} |", markup=False, highlight=False)
    total = {column: sum(row[column] for row in said["kinds"].values()) for column in COLUMNS}
    console.print(f"| all | {' | '.join(str(total[column]) for column in COLUMNS)} |", markup=False, highlight=False)
    console.print(f"{said['counters']} counters of /metrics compared after the first part.", highlight=False)
    for line in (*said["differ"][:10], *said["stock unlike stock"][:5]):
        console.print(line, style="red", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
