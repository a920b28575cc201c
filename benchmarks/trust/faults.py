"""``python -m benchmarks.trust.faults [NAME ...]``: faults on purpose, each on a stock server and on a fastpath one.

Both arms get the same requests, and the same fault at the same point: streams start one after another, each when the
one before has its first piece, and the fault comes when all are under way (or a request's id says what is done to it,
see `injected`). So each request is at the same replica in both. Of a request that ends well every byte must be equal;
of one that fails, status, code and words, and what came before is a prefix of the other arm's: how far a stream is when
a process dies is a matter of time. Then more requests come, one after another. Servers are real, with real stage
engines where no *light* is said; several faults are done to one pair of servers in turn. ``/dev/shm`` is a small one of
this program's own, where the machine allows that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from benchmarks.ab.capture import Capture, answers_differ, chat_request, follow, session
from benchmarks.rigs import results, server_arms, side_by_side, whole_server
from benchmarks.rigs.arm import STOCK, Arm
from benchmarks.rigs.server import Server
from benchmarks.rigs.side_by_side import guarded
from benchmarks.trust import FLAT, SHARED_MEMORY, injected, segments
from omni_fastpath.declare import State
from omni_fastpath.patches import PATCHES

FASTPATH = Arm("fastpath", {"OMNI_FASTPATH": "1"} | {each.env: "1" for each in PATCHES if not each.default_on})
STREAMS, LATER = 8, 4
TOKENS, LONGER, LONG = 300, 800, 2500
"""Of an answer; the longer one goes on until all others have begun, however busy the machine, and the long one is more
than sockets hold."""
STAGES = {"*": FLAT, "thinker": {"base_ms": 8.0}, "talker": {"base_ms": 6.0}, "code2wav": {"base_ms": 4.0}}
LIMIT_S = 120.0
"""After the fault; a request that has not ended by then is lost."""
LOST = "it did not end"
CHUNK_WAIT_S = 30
"""After which upstream fails a request whose next chunk does not come; its default is ten minutes."""
STOPPED_S = 4.0
HOLD_ON_S = 20.0
"""How long clients wait after SIGTERM."""
READ_BUFFER = 1 << 19
_LAST = 'stage_id: 2\n    devices: "1'
_REPLICAS = {1: ("", ""), 2: (f'{_LAST}"', f'{_LAST},2"\n    num_replicas: 2')}
"""Of the last stage: what its deploy YAML says, and what in its place."""
_PRIVATE = "TEST_FAULTS_PRIVATE_SHM"
_MOUNT = 'mount -t tmpfs -o size=512m tmpfs /dev/shm && exec "$@"'

Act = Callable[[Server], Awaitable[None]]


@dataclass(frozen=True)
class World:
    """What a server is started with."""

    name: str
    code2wavs: int = 1
    light: bool = False
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """One scenario.

    Attributes:
        name: As the command line has it.
        done: In words.
        world: Where.
        act: What is done, from outside.
        is_first: Before the first request, instead of when all are under way.
        ends: The server ends; nobody comes later, and clients wait no longer than ``act`` does.
        word: In the ids of those that are hit.
        hits: Which of the streams.
        differ: In what their requests differ from the others'.
        is_injected: `injected` does it, in both arms; ``None``: in fastpath alone.
    """

    name: str
    done: str
    world: World
    act: Act | None = None
    is_first: bool = False
    ends: bool = False
    word: str = "hit"
    hits: tuple[int, ...] = (1, 2)
    differ: Mapping[str, Any] = field(default_factory=dict)
    is_injected: bool | None = False


# ---- What is done ----


def signalled(role: str, number: signal.Signals) -> Act:
    """A process of the server's gets a signal."""

    async def act(server: Server) -> None:
        next(psutil.Process(pid) for pid, each in server.processes().items() if each == role).send_signal(number)

    return act


async def _stop_and_continue(server: Server) -> None:
    await signalled("stage1_replica0", signal.SIGSTOP)(server)
    await asyncio.sleep(STOPPED_S)
    await signalled("stage1_replica0", signal.SIGCONT)(server)


async def _kill_an_api_server(server: Server) -> None:
    """One that another one has started, not the first, which then ends the server."""
    processes = [psutil.Process(pid) for pid, each in server.processes().items() if each == "api"]
    pids = {each.pid for each in processes}
    min((each for each in processes if each.ppid() in pids), key=lambda each: each.pid).kill()
    await _its_end(server)


async def _its_end(server: Server) -> None:
    await _until(lambda: not server.alive())


async def _stop_server(server: Server) -> None:
    """Its end is waited for when the clients have left."""
    await asyncio.wait({asyncio.create_task(asyncio.to_thread(server.stop))}, timeout=HOLD_ON_S)


async def _fill(_server: Server) -> None:
    """Files, zeros and all, until nothing more goes in."""
    with contextlib.suppress(OSError), (SHARED_MEMORY / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


_TWO, _TERMINATED, _FULL = World("two-code2wavs", code2wavs=2), World("terminated"), World("full")
_LIGHT, _APIS = World("light", light=True), World("two-apis", light=True, arguments=("--api-server-count", "2"))


def _killed(name: str, done: str, role: str) -> Fault:
    """A process is killed while all streams, longer ones, are under way."""
    act = signalled(role, signal.SIGKILL)
    return Fault(name, done, _TWO, act, hits=tuple(range(STREAMS)), differ={"max_tokens": LONGER})


_FILLED = Fault("full", "no room in shared memory from before the first request", _FULL, _fill, is_first=True)

FAULTS = (
    Fault("stopped", f"the talker: SIGSTOP, {STOPPED_S:g} s later SIGCONT", _TWO, _stop_and_continue),
    Fault("leave", "two clients close after five pieces", _TWO, differ={"abort_after": 5}),
    Fault("late", "two clients read nothing until the others have all", _TWO, word="late", differ={"max_tokens": LONG}),
    Fault("put-fails", "a put says that it failed, for two", _TWO, word="put-fails", is_injected=True),
    Fault("put-raises", "a put raises, for two", _TWO, word="put-raises", is_injected=True),
    Fault("put-blocks", f"a put takes {injected.BLOCKED_S:g} s, for two", _TWO, word="put-blocks", is_injected=True),
    Fault("hook-sleeps", "a hook sleeps at each output of two", _TWO, word="hook-sleeps", is_injected=None),
    Fault("hook-raises", "a hook raises", _TWO, word="hook-raises", is_injected=None),
    _killed("killed", "a code2wav of two: SIGKILL", "stage2_replica0"),
    _killed("killed-last", "the code2wav that is left: SIGKILL", "stage2_replica1"),
    Fault("sigterm", f"SIGTERM, and clients leave {HOLD_ON_S:g} s later", _TERMINATED, _stop_server, ends=True),
    _FILLED,
    Fault(
        "processing",
        "upstream's processing of one output raises, which ends the server, light",
        _LIGHT,
        _its_end,
        ends=True,
        word="processing-raises",
        hits=(STREAMS - 1,),
        differ={"modalities": ("text",)},
        is_injected=True,
    ),
    Fault("api-killed", "one API server of two: SIGKILL, light", _APIS, _kill_an_api_server, ends=True),
)


# ---- A server, and what is asked of it ----


@dataclass
class Seen:
    """What one arm's server showed of one fault."""

    asked: list[Capture]
    injected: int
    acted_s: float


@dataclass
class Served:
    """What one arm's server showed of all of them, how it ended, and what it left."""

    seen: list[Seen]
    shutdown_s: float
    killed: tuple[str, ...]
    left: list[str]
    stepped_aside: list[tuple[str, str, str]]
    """Process, patch and reason."""


async def _until(is_so: Callable[[], bool]) -> None:
    for _ in range(int(LIMIT_S / 0.005)):
        if is_so():
            return
        await asyncio.sleep(0.005)


async def ask(server: Server, fault: Fault, place: int = 0) -> tuple[list[Capture], float]:
    """What was answered, and how long ``act`` took, seconds; *place* is the fault's among those of this server."""
    found: list[Capture] = []
    tasks: list[asyncio.Task[Capture]] = []
    reads = asyncio.Event()

    def begin(to: aiohttp.ClientSession, *, is_hit: bool) -> Callable[[], bool]:
        number = len(found)
        name = f"{fault.word if is_hit else 'plain'}-{place}-{number}"
        body: dict[str, Any] = {"max_tokens": TOKENS, **(fault.differ if is_hit else {})}
        request = chat_request(f"Question {number} of {fault.name}", ignore_eos=True, request_id=name, **body)
        capture = Capture(request, 0.0)
        is_late = is_hit and fault.name == "late"
        how: dict[str, Any] = {"reads": reads, "read_bufsize": READ_BUFFER} if is_late else {}
        task = asyncio.create_task(follow(to, capture, **how))
        found.append(capture)
        tasks.append(task)
        return lambda: task.done() or bool(capture.pieces or (is_late and capture.status))

    async with session(server.url) as to:
        if fault.act is not None and fault.is_first:
            await fault.act(server)
        for number in range(STREAMS):
            await _until(begin(to, is_hit=number in fault.hits))
        begun = time.monotonic()
        if fault.act is not None and not fault.is_first:
            await fault.act(server)
        acted_s = time.monotonic() - begun
        others = [task for number, task in enumerate(tasks) if fault.name != "late" or number not in fault.hits]
        await asyncio.wait(others, timeout=0.1 if fault.ends else LIMIT_S)
        reads.set()
        await asyncio.wait(tasks, timeout=0.1 if fault.ends else LIMIT_S)
        for _ in range(0 if fault.ends else LATER):
            begin(to, is_hit=False)
            await asyncio.wait(tasks[-1:], timeout=LIMIT_S)
        for capture, task in zip(found, tasks, strict=True):
            if not task.done():
                task.cancel()
                capture.fail(LOST)
        await asyncio.wait(tasks)
    return found, acted_s


def _serve(arm: Arm, world: World, faults: Sequence[Fault], work: Path) -> Served:
    plugin = injected.plugin(work / arm.name)
    variables = {"VLLM_OMNI_INPUT_WAIT_TIMEOUT_S": str(CHUNK_WAIT_S), "PYTHONPATH": plugin}
    deploy = work / "deploy.yaml"
    deploy.write_text(whole_server.deploy("qwen3_omni.yaml").read_text().replace(*_REPLICAS[world.code2wavs]))
    log = results.FOLDER.resolve() / "faults-logs" / f"{world.name}-{arm.name}.log"
    given: dict[str, Any] = {"light": world.light, "variables": variables, "log_path": log}
    arm = replace(arm, arguments=world.arguments)
    server = whole_server.server(arm, "qwen3_omni", deploy, {"stages": STAGES}, **given)
    before, seen = _segments(), []
    with server:
        server_arms.prove(server, arm, {"api", "engines"} if world.light else server_arms.roles(3))
        for place, fault in enumerate(faults):
            results.progress(f"{arm.name}: {fault.name}")
            asked, acted_s = asyncio.run(ask(server, fault, place))
            (SHARED_MEMORY / "ballast").unlink(missing_ok=True)
            said = server.log_path.read_text(errors="replace").count(f"[injected] {fault.word}")
            seen.append(Seen(asked, said, acted_s))
        records = ((role, *each) for role, one in server.snapshots().items() for each in one.patches.items())
        aside = [(role, name, each.reason) for role, name, each in records if each.state is State.FAILED]
    assert server.shutdown is not None
    left = sorted({*server.shutdown.leftovers, *(_segments() - before)})
    for name in _segments() - before:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    # Where it ended by itself, from the fault on.
    seconds = server.shutdown.seconds + (acted_s if fault.ends and fault.act is not _stop_server else 0.0)
    return Served(seen, seconds, server.shutdown.killed, left, aside)


def _segments() -> set[str]:
    """What lies there, if nobody else's does."""
    return set(segments()) if os.environ.get(_PRIVATE) == "1" else set()


# ---- Stock and fastpath ----


def unlike(stock: Capture, fast: Capture) -> str | None:
    """In what a request's fate differs between the arms."""
    if stock.succeeded and fast.succeeded:
        return "; ".join(answers_differ([fast.answer()], [stock.answer()]))[:300] or None
    fates = [(each.status, each.error_code, _words(each.error), each.aborted) for each in (stock, fast)]
    if fates[0] != fates[1]:
        return f"{fates[1]} against {fates[0]}"
    pairs = ((stock.text.encode(), fast.text.encode()), (stock.audio, fast.audio))
    return None if all(a.startswith(b) or b.startswith(a) for a, b in pairs) else "neither begins as the other"


def _words(error: str | None) -> str:
    """Without ports, process ids and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "N", error or "")


def _compare(fault: Fault, stock: Seen, fast: Seen) -> list[str]:
    pairs = enumerate(zip(stock.asked, fast.asked, strict=True))
    found = [f"request {number}: {words}" for number, (a, b) in pairs if (words := unlike(a, b))]
    if fault.is_injected is not False and not (fast.injected and (stock.injected or fault.is_injected is None)):
        found.append(f"the fault was not there: {stock.injected} times in stock, {fast.injected} in fastpath")
    return found


def _run(names: Sequence[str], console: Console) -> int:
    asked = [fault for fault in FAULTS if not names or fault.name in names]
    if os.environ.get(_PRIVATE) != "1":
        console.print("Left out: full, and what is left in /dev/shm: a mount of our own is not allowed here.")
        asked = [fault for fault in asked if fault is not _FILLED]
    groups = [(world, list(faults)) for world, faults in itertools.groupby(asked, key=lambda fault: fault.world)]
    return 1 if [unlike for world, faults in groups for unlike in _pair(world, faults, console)] else 0


def _pair(world: World, faults: Sequence[Fault], console: Console) -> list[str]:
    """The faults on a pair of servers, in a table; in what fastpath differs."""
    with tempfile.TemporaryDirectory() as work:
        stock, fast = (_serve(arm, world, faults, Path(work)) for arm in (STOCK, FASTPATH))
    differ = [_compare(fault, *seen) for fault, *seen in zip(faults, stock.seen, fast.seen, strict=True)]
    rows = []
    for fault, found, a, b in zip(faults, differ, stock.seen, fast.seen, strict=True):
        whole = (sum(each.succeeded for each in seen.asked) for seen in (a, b))
        lost = (sum(each.error == LOST for each in seen.asked) for seen in (a, b))
        rows.append([f"{fault.name}: {fault.done}", str(len(a.asked)), _both(whole), str(len(found)), _both(lost)])
    rows[-1] += [_both(f"{each.shutdown_s:.1f}" for each in (stock, fast)), _both(len(x.left) for x in (stock, fast))]
    columns = ("fault", "requests", "answered whole", "different", "lost", "shutdown s", "left in /dev/shm")
    results.show(f"{world.name}: stock / fastpath", columns, rows)
    said = [f"{fault.name}: {each}" for fault, found in zip(faults, differ, strict=True) for each in found]
    said += [f"{world.name}: stepped aside: {each}" for each in fast.stepped_aside]
    if len(fast.killed) > len(stock.killed):
        said.append(f"{world.name}: had to be killed: {fast.killed}, of stock {stock.killed}")
    if len(fast.left) > len(stock.left):
        said.append(f"{world.name}: left in /dev/shm: {fast.left}, of stock {stock.left}")
    for fault, seen in zip(faults, fast.seen, strict=True):
        words = sorted({f"{each.status} {_words(each.error)}" for each in seen.asked if not each.succeeded})
        console.print(f"{fault.name} fails with: {'; '.join(words) or 'nothing'}", markup=False, highlight=False)
    for line in said:
        console.print(f"DIFFERENT: {line}", markup=False, highlight=False)
    return said


def _both(values: Iterable[Any]) -> str:
    return " / ".join(map(str, values))


def main(argv: Sequence[str] | None = None) -> int:
    """Do the faults; 0: no difference, 1: one, or it could not be seen, 2: usage, 130: interrupted."""
    parser = side_by_side.parser("benchmarks.trust.faults", __doc__)
    parser.add_argument("names", nargs="*", choices=[*(fault.name for fault in FAULTS), []], metavar="NAME")
    names = parser.parse_args(argv).names
    if _PRIVATE not in os.environ:
        _again_with_own_shared_memory(names)
    return guarded("The faults", lambda console: _run(names, console))


def _again_with_own_shared_memory(names: Sequence[str]) -> None:
    """Become this program in a mount namespace with a ``/dev/shm`` of its own, where that is allowed."""
    unshare = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh"]
    can = bool(shutil.which("unshare")) and not subprocess.run([*unshare, "true"], check=False).returncode
    command = [*(unshare if can else ()), sys.executable, "-W", "ignore", "-m", "benchmarks.trust.faults", *names]
    os.execvpe(command[0], command, {**os.environ, _PRIVATE: "1" if can else "0"})  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(main())
