"""Start after start: a server of each arm in turn: proved, loaded, asked the fixed requests, proved again, stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastpath.tools.ab import asked, client, measures, requests, serving, states
from omni_fastpath.tools.ab.about import about, commit
from omni_fastpath.tools.ab.arm import WrongArmError
from omni_fastpath.tools.ab.asked import Arm
from omni_fastpath.tools.ab.capture import Capture, Request, run_closed_loop
from omni_fastpath.tools.ab.errors import INTERRUPTED, Interrupted, MeasureError
from omni_fastpath.tools.ab.files import Series, Start
from omni_fastpath.tools.ab.interrupts import Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.serving import LOG_FOLLOWS, Serving
from omni_fastpath.tools.ab.turns import turns
from omni_fastpath.variables import NAMESPACE

PHASES_A_START = 5
SIMULATED = "OMNI_SIMULATED_DEVICE"
"""The variable of this project's simulated device, which answers alike whatever the batch."""

_MATTER = (NAMESPACE, "VLLM_OMNI_", "VLLM_PLUGINS", SIMULATED)
"""How the variables begin that a report names where an arm has them of this shell."""

EXPECTED = (MeasureError, WrongArmError, OSError, ValueError)
"""What ends a series and says itself what it was; anything else is a mistake of this program."""

_KEY = "OPENAI_API_KEY"
"""Where upstream's client finds what a server that asks for a key wants to hear."""


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
        port: Of every server; None: a free one for each.
        primary: Key of the primary measure; None: the first that is known.
        judged: Keys of the others; empty: the first that are known.
        ready_timeout_s: How long a server may take to be ready.
        stop_timeout_s: How long it may take to end.
        bench_timeout_s: How long the client may take; None: as long as it likes.
        command: What was run, for the report.
    """

    arms: tuple[Arm, Arm]
    starts: int
    serve: Sequence[str]
    bench: Sequence[str]
    requests: Sequence[Request]
    no_requests: str
    out: Path
    port: int | None = None
    primary: str | None = None
    judged: Sequence[str] = ()
    ready_timeout_s: float = serving.READY_TIMEOUT_S
    stop_timeout_s: float = serving.STOP_TIMEOUT_S
    bench_timeout_s: float | None = None
    command: str = ""

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
    order = plan.order
    try:
        with phases.running():
            for place, arm in enumerate(order, 1):
                with phases.turn(place, len(order)):
                    _start(plan, arm, place, phases, interrupts, found)
                    measures.table(found, primary=plan.primary, judged=plan.judged)  # what is not there never will be
    except (Exception, Interrupted) as error:  # whatever it was, what was measured until then is worth its report
        ended = error
    return Series(
        arms=(plan.arms[0].name, plan.arms[1].name),
        starts=found,
        wanted=len(order),
        ended=_words(ended, len(found) + 1),
        arm_words={arm.name: _described(arm) for arm in plan.arms},
        primary=plan.primary if _is_measured(found, plan.primary) else None,
        judged=[key for key in plan.judged if _is_measured(found, key)],
        command=plan.command,
    ), ended


def _described(arm: Arm) -> str:
    return Start(arm=arm.name, variables=arm.told, inherited=inherited(arm), serve=["a server"]).words


def inherited(arm: Arm) -> dict[str, str]:
    """What an arm has of this shell's environment besides its own, of what may matter to vLLM-Omni and to us."""
    ours = {name: os.environ[name] for name in os.environ if name.startswith(_MATTER) and name not in arm.variables}
    return Arm(arm.name, ours).told


def _is_measured(found: Sequence[Start], key: str | None) -> bool:
    return any(key in start.measured for start in found)


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
    return {**os.environ, **arm.variables}


def _start(plan: Plan, arm: Arm, place: int, phases: Phases, interrupts: Interrupts, measured: list[Start]) -> None:
    """One start, from the server's start to its stop; it is kept once it is measured, before the server is stopped."""
    title = f"{place}/{2 * plan.starts} {arm.name}"
    environ = environment(arm)
    port = plan.port or asked.free_port()
    if not asked.is_free(port):
        raise MeasureError(f"port {port} is in use")
    named = f"{place:02}-{arm.name}"
    result = plan.out / "results" / f"{named}.json"
    values = {asked.PORT: port, asked.RESULT: result, asked.HOST: "127.0.0.1", asked.URL: f"http://127.0.0.1:{port}"}
    serve, bench = asked.filled(plan.serve, values), asked.filled(plan.bench, values)
    wanted = states.expected(environ, serve)
    server = Serving(
        serve,
        port,
        environment=environ,
        log=plan.out / "logs" / f"{named}-server.log",
        interrupts=interrupts,
        ready_timeout_s=plan.ready_timeout_s,
        stop_timeout_s=plan.stop_timeout_s,
    )
    try:
        with phases.phase(f"{title}: starting the server"):
            server.__enter__()
        with phases.phase(f"{title}: proof of the arm"):
            states.prove(server, arm, wanted)
        with phases.phase(f"{title}: benchmark client"):
            found = client.run(
                bench,
                result,
                environment=client_environment(),
                log=plan.out / "logs" / f"{named}-bench.log",
                interrupts=interrupts,
                server=server,
                timeout_s=plan.bench_timeout_s,
            )
        with phases.phase(f"{title}: {len(plan.requests)} fixed requests, proof of the arm"):
            answers = ask(server.url, plan.requests, asked.headers(bench))
            time.sleep(states.SETTLE_S if wanted.enabled else 0.0)
            server.check()
            said = states.prove(server, arm, wanted)
        start = Start(
            arm=arm.name,
            variables=arm.told,
            inherited=inherited(arm),
            place=place,
            about=about(),
            serve=asked.shield(serve),
            bench=asked.shield(bench),
            start_s=server.start_s,
            measured=measures.read(found),
            result=client.scalars(found),
            failed=failed(found),
            answers=answers,
            no_answers=plan.no_requests,
            questions=requests.digest(plan.requests),
            simulated=is_simulated(environ),
            states=states.told(said),
        )
        start.write(plan.out / "starts" / f"{named}.json")
        measured.append(start)
    finally:
        with interrupts.held(), phases.phase(f"{title}: stopping"):
            server.__exit__(None, None, None)


def client_environment() -> dict[str, str]:
    """The client's environment: this shell's, without what is for servers, so that it is the same in both arms."""
    return {name: value for name, value in os.environ.items() if not name.startswith(NAMESPACE)}


def failed(result: Mapping[str, Any]) -> int:
    """How many requests the client says failed."""
    count = result.get("failed")
    return count if isinstance(count, int) else 0


def is_simulated(environ: Mapping[str, str]) -> bool:
    """Whether the device of such a server is the simulated one, whose bits depend on the request alone."""
    return environ.get(SIMULATED) in ("1", "light")


def ask(url: str, requests: Sequence[Request], headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the fixed requests were answered, one after another; with the headers that the client sends."""
    if not requests:
        return []
    key = None if "authorization" in map(str.lower, headers) else os.environ.get(_KEY)
    own = {"Authorization": f"Bearer {key}"} if key else {}
    captures = run_closed_loop(url, requests, headers={**own, **headers})
    return [{**capture.answer(), "order": order(capture)} for capture in captures]


def order(capture: Capture) -> str:
    """Whether a streamed answer ended once, and last."""
    kinds = [event.kind for event in capture.events]
    if "done" not in kinds:
        return "no end marker"
    return "the end once and last" if kinds.index("done") == len(kinds) - 1 else "something after the end"
