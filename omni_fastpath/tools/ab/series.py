"""Start after start: a server of each arm in turn: proved, loaded, asked the fixed requests, proved again, stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_fastpath.config import ConfigError
from omni_fastpath.process_role import NAMESPACE
from omni_fastpath.tools.ab import commands, measures, redaction, serving, states
from omni_fastpath.tools.ab.capture import Request, ask
from omni_fastpath.tools.ab.files import About, Answer, Series, Start, about
from omni_fastpath.tools.ab.interrupts import INTERRUPTED, Interrupted, Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.serving import LOG_FOLLOWS, Child, MeasureError, Serving, tail

PHASES_A_START = 5

EXPECTED = (MeasureError, ConfigError, OSError)
"""What ends a series and says itself what it was; anything else is a mistake of this program."""

_MATTER = (NAMESPACE, "VLLM_OMNI_", "VLLM_PLUGINS")
"""How the variables begin that a report names where an arm has them of this shell."""
_KEY = "OPENAI_API_KEY"
"""Where upstream's client finds what a server that asks for a key wants to hear."""


@dataclass(frozen=True)
class Arm:
    """A name, and the variables that its servers have besides this shell's."""

    name: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        arms: The second is judged against the first.
        starts: Of each arm, an even number.
        serve: The server's command, with its placeholders.
        bench: The client's.
        requests: The fixed requests.
        out: Folder of starts, results and logs.
        primary: Key of the primary measure; None: the first that is known.
    """

    arms: tuple[Arm, Arm]
    starts: int
    serve: Sequence[str]
    bench: Sequence[str]
    requests: Sequence[Request]
    out: Path
    primary: str | None

    @property
    def order(self) -> list[Arm]:
        """The arm of each start, A B B A, so that what drifts on the machine hits both alike."""
        a, b = self.arms
        return [a, b, b, a] * (self.starts // 2)


def environment(arm: Arm) -> dict[str, str]:
    """What a server of this arm has in its environment: this shell's, and the arm's own on top."""
    return {**os.environ, **arm.environment}


def shown_variables(arm: Arm) -> dict[str, str]:
    """What a report says of that: the arm's own variables, and of this shell's those that matter to vLLM-Omni or us."""
    of_shell = {name: value for name, value in os.environ.items() if name.startswith(_MATTER)}
    return redaction.variables({**of_shell, **arm.environment})


def run(plan: Plan, phases: Phases, interrupts: Interrupts) -> tuple[Series, Exception | Interrupted | None]:
    """Measure every start, as far as it goes.

    Returns:
        What was measured, and what ended it before its end; None where nothing did.
    """
    found: list[Start] = []
    ended: Exception | Interrupted | None = None
    try:
        for place, arm in enumerate(plan.order, 1):
            _start(plan, arm, place, phases, interrupts, found)
    except (Exception, Interrupted) as error:  # whatever it was, what was measured until then is worth its report
        ended = error
    a, b = (arm.name for arm in plan.arms)
    return Series((a, b), found, len(plan.order), ended=_words(ended, len(found)), primary=plan.primary), ended


def _words(ended: Exception | Interrupted | None, measured: int) -> str:
    if ended is None:
        return ""
    if isinstance(ended, Interrupted):
        return INTERRUPTED
    first = str(ended).partition("\n")[0].partition(LOG_FOLLOWS)[0]
    return f"after {measured} starts: {type(ended).__name__}: {first}"


def _start(plan: Plan, arm: Arm, place: int, phases: Phases, interrupts: Interrupts, measured: list[Start]) -> None:
    """One start, from the server's start to its stop; it is kept once it is measured, before the server is stopped."""
    title, named = f"{place}/{2 * plan.starts} {arm.name}", f"{place:02}-{arm.name}"
    environ, port = environment(arm), serving.free_port()
    result = plan.out / "results" / f"{named}.json"
    serve, bench = (commands.filled(words, port, result) for words in (plan.serve, plan.bench))
    wanted = states.expected(environ, serve)
    server = Serving(
        command=serve,
        port=port,
        environment=environ,
        log=plan.out / "logs" / f"{named}-server.log",
        interrupts=interrupts,
    )
    client = Child(
        what="benchmark client",
        command=bench,
        # Without what is for servers, so that it is the same in both arms.
        environment={name: value for name, value in os.environ.items() if not name.startswith(NAMESPACE)},
        log=plan.out / "logs" / f"{named}-bench.log",
        interrupts=interrupts,
        stop_timeout_s=5.0,
    )
    try:
        with phases.phase(f"{title}: starting the server"):
            server.start()
        with phases.phase(f"{title}: proof of the arm"):
            states.prove(server, arm.name, wanted)
        with phases.phase(f"{title}: benchmark client"):
            found = _result(client, server, result)
        with phases.phase(f"{title}: {len(plan.requests)} fixed requests, proof of the arm"):
            with interrupts.at_once():
                answers = _ask(server.url, plan.requests, commands.headers(bench))
            time.sleep(states.SETTLE_S if wanted.enabled else 0.0)
            server.check()
            said = states.prove(server, arm.name, wanted)
        start = Start(
            arm=arm.name,
            variables=shown_variables(arm),
            place=place,
            about=About(**about()),
            serve=redaction.command(plan.serve),
            bench=redaction.command(plan.bench),
            start_s=server.start_s,
            measured=measures.read(found),
            failed=found.get("failed") or 0,
            answers=[Answer(**each) for each in answers],
            questions=commands.digest(plan.requests),
            states=states.as_data(said),
        )
        start.write(plan.out / "starts" / f"{named}.json")
        measured.append(start)
        measures.check_primary(plan.primary, [start])  # now, and not after hours
    finally:
        with phases.phase(f"{title}: stopping"):
            server.stop()


def _result(client: Child, server: Child, result: Path) -> dict[str, Any]:
    """Run the benchmark client to its end, beside a server that must live, and read the JSON that it wrote.

    Args:
        client: To be started.
        server: It is running.
        result: Where the client writes.

    Raises:
        MeasureError: It failed or wrote nothing that can be compared, or the server ended meanwhile.
    """
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        client.start()
        status = client.wait(server)
    finally:
        client.stop()
    if status:
        raise MeasureError(f"the benchmark client ended with status {status}{tail(client.log)}")
    try:
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        has_measures = bool(measures.read(found)) and found.get("completed") != 0
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise MeasureError(f"the benchmark client wrote no result that can be read{tail(client.log)}") from error
    if not has_measures:
        raise MeasureError(f"the benchmark client completed no request, or measured nothing{tail(client.log)}")
    return found


def _ask(url: str, sent: Sequence[Request], headers: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the fixed requests were answered, one after another; with the headers that the client sends."""
    key = None if "authorization" in map(str.lower, headers) else os.environ.get(_KEY)
    own = {"Authorization": f"Bearer {key}"} if key else {}
    return [capture.answer() for capture in ask(url, sent, {**own, **headers})]
