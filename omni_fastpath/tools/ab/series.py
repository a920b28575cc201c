"""Start after start: a server of each arm in turn: proved, loaded, asked the fixed requests, proved again, stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastpath.tools.ab import commands, measures, redaction, requests, serving, states
from omni_fastpath.tools.ab.about import about, commit
from omni_fastpath.tools.ab.arm import Arm, WrongArmError
from omni_fastpath.tools.ab.capture import Capture, Request, run_closed_loop
from omni_fastpath.tools.ab.errors import INTERRUPTED, Interrupted, MeasureError
from omni_fastpath.tools.ab.files import Series, Start
from omni_fastpath.tools.ab.interrupts import Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.serving import LOG_FOLLOWS, Child, Serving, tail
from omni_fastpath.tools.ab.turns import turns
from omni_fastpath.variables import NAMESPACE

PHASES_A_START = 5
SIMULATED = "OMNI_SIMULATED_DEVICE"
"""The variable of this project's simulated device, which answers alike whatever the batch."""

EXPECTED = (MeasureError, WrongArmError, OSError, ValueError)
"""What ends a series and says itself what it was; anything else is a mistake of this program."""

_MATTER = (NAMESPACE, "VLLM_OMNI_", "VLLM_PLUGINS", SIMULATED)
"""How the variables begin that a report names where an arm has them of this shell."""
_KEY = "OPENAI_API_KEY"
"""Where upstream's client finds what a server that asks for a key wants to hear."""
_CLIENT_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        arms: The second is judged against the first.
        starts: Of each arm.
        serve: The server's command, with its placeholders.
        bench: The client's.
        requests: The fixed requests.
        no_requests: In words why there are none.
        out: Folder of starts, results and logs.
        primary: Key of the primary measure; None: the first that is known.
        judged: Keys of the others; empty: the first that are known.
        ready_timeout_s: How long a server may take to be ready.
        stop_timeout_s: How long it may take to end.
        bench_timeout_s: How long the client may take; None: as long as it likes.
    """

    arms: tuple[Arm, Arm]
    starts: int
    serve: Sequence[str]
    bench: Sequence[str]
    requests: Sequence[Request]
    no_requests: str
    out: Path
    primary: str | None = None
    judged: Sequence[str] = ()
    ready_timeout_s: float = serving.READY_TIMEOUT_S
    stop_timeout_s: float = serving.STOP_TIMEOUT_S
    bench_timeout_s: float | None = None

    @property
    def order(self) -> list[Arm]:
        """The arm of each start."""
        return [arm for _, arm in turns(self.arms, self.starts)]


def run(plan: Plan, phases: Phases, interrupts: Interrupts) -> tuple[Series, Exception | Interrupted | None]:
    """Measure every start, as far as it goes.

    Returns:
        What was measured, and what ended it before its end; None where nothing did.
    """
    commit()  # of the code that runs, whatever is committed meanwhile
    found: list[Start] = []
    ended: Exception | Interrupted | None = None
    try:
        for place, arm in enumerate(plan.order, 1):
            _start(plan, arm, place, phases, interrupts, found)
            # A named measure that the first start does not have is refused now, and not after hours.
            measures.table(found, primary=plan.primary, judged=plan.judged)
    except (Exception, Interrupted) as error:  # whatever it was, what was measured until then is worth its report
        ended = error
    known = {key for start in found for key in start.measured}
    return Series(
        arms=(plan.arms[0].name, plan.arms[1].name),
        starts=found,
        wanted=len(plan.order),
        ended=_words(ended, len(found) + 1),
        primary=plan.primary if plan.primary in known else None,
        judged=[key for key in plan.judged if key in known],
    ), ended


def inherited(arm: Arm) -> dict[str, str]:
    """What an arm has of this shell's environment besides its own, of what may matter to vLLM-Omni and to us."""
    return {name: os.environ[name] for name in os.environ if name.startswith(_MATTER) and name not in arm.environment}


def _words(ended: Exception | Interrupted | None, place: int) -> str:
    if ended is None:
        return ""
    if isinstance(ended, Interrupted):
        return INTERRUPTED
    said = str(ended) if isinstance(ended, EXPECTED) else f"{type(ended).__name__}: {ended}"
    first = (said.splitlines() or [type(ended).__name__])[0]
    return f"start {place}: {first.partition(LOG_FOLLOWS)[0]}"


def environment(arm: Arm) -> dict[str, str]:
    """What a server of this arm has in its environment: this shell's, and the arm's own on top."""
    return {**os.environ, **arm.environment}


def _start(plan: Plan, arm: Arm, place: int, phases: Phases, interrupts: Interrupts, measured: list[Start]) -> None:
    """One start, from the server's start to its stop; it is kept once it is measured, before the server is stopped."""
    title = f"{place}/{2 * plan.starts} {arm.name}"
    environ = environment(arm)
    port = commands.free_port()
    named = f"{place:02}-{arm.name}"
    result = plan.out / "results" / f"{named}.json"
    values = {
        commands.PORT: port,
        commands.RESULT: result,
        commands.HOST: "127.0.0.1",
        commands.URL: f"http://127.0.0.1:{port}",
    }
    serve, bench = commands.filled(plan.serve, values), commands.filled(plan.bench, values)
    wanted = states.expected(environ, serve)
    server = Serving(
        command=serve,
        port=port,
        environment=environ,
        log=plan.out / "logs" / f"{named}-server.log",
        interrupts=interrupts,
        ready_timeout_s=plan.ready_timeout_s,
        stop_timeout_s=plan.stop_timeout_s,
    )
    client = Child(
        what="benchmark client",
        command=bench,
        # Without what is for servers, so that it is the same in both arms.
        environment={name: value for name, value in os.environ.items() if not name.startswith(NAMESPACE)},
        log=plan.out / "logs" / f"{named}-bench.log",
        interrupts=interrupts,
        stop_timeout_s=_CLIENT_STOP_TIMEOUT_S,
    )
    try:
        with phases.phase(f"{title}: starting the server"):
            server.__enter__()
        with phases.phase(f"{title}: proof of the arm"):
            states.prove(server, arm, wanted)
        with phases.phase(f"{title}: benchmark client"):
            found = _result(client, server, result, plan.bench_timeout_s)
        with phases.phase(f"{title}: {len(plan.requests)} fixed requests, proof of the arm"):
            answers = _ask(server.url, plan.requests, commands.headers(bench))
            time.sleep(states.SETTLE_S if wanted.enabled else 0.0)
            server.check()
            said = states.prove(server, arm, wanted)
        start = Start(
            arm=arm.name,
            variables=redaction.variables(arm.environment),
            inherited=redaction.variables(inherited(arm)),
            place=place,
            about=about(),
            serve=redaction.command(plan.serve),
            bench=redaction.command(plan.bench),
            start_s=server.start_s,
            measured=measures.read(found),
            failed=found["failed"] if isinstance(found.get("failed"), int) else 0,
            answers=answers,
            no_answers=plan.no_requests,
            questions=requests.digest(plan.requests),
            simulated=environ.get(SIMULATED) in ("1", "light"),
            states=states.told(said),
        )
        start.write(plan.out / "starts" / f"{named}.json")
        measured.append(start)
    finally:
        with interrupts.held(), phases.phase(f"{title}: stopping"):
            server.__exit__(None, None, None)


def _result(client: Child, server: Child, result: Path, timeout_s: float | None) -> dict[str, Any]:
    """Run the benchmark client to its end, beside a server that must live, and read the JSON that it wrote.

    Raises:
        MeasureError: It failed or wrote nothing that can be compared, or the server ended meanwhile.
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of a series that ended here before a start was measured
    with client:
        status = client.wait(timeout_s, [server])
    if status:
        raise MeasureError(f"the benchmark client ended with status {status}{tail(client.log)}")
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasureError(f"the benchmark client wrote no result that can be read{tail(client.log)}") from error
    if not isinstance(found, dict) or not measures.read(found):
        raise MeasureError(f"the benchmark client's result has no number that could be compared: {result}")
    if found.get("completed") == 0:
        raise MeasureError(f"the benchmark client completed no request{tail(client.log)}")
    return found


def _ask(url: str, sent: Sequence[Request], headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the fixed requests were answered, one after another; with the headers that the client sends."""
    key = None if "authorization" in map(str.lower, headers) else os.environ.get(_KEY)
    own = {"Authorization": f"Bearer {key}"} if key else {}
    captures = run_closed_loop(url, sent, headers={**own, **headers}) if sent else []
    return [{**capture.answer(), "order": order(capture)} for capture in captures]


def order(capture: Capture) -> str:
    """Whether a streamed answer ended once, and last."""
    kinds = [event.kind for event in capture.events]
    if "done" not in kinds:
        return "no end marker"
    return "the end once and last" if kinds.index("done") == len(kinds) - 1 else "something after the end"
