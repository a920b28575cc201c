"""The series of starts. Each server is checked, loaded, sent the fixed requests, checked again, and stopped."""

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
"""Exceptions with a complete message. Any other exception is a defect of this program."""

_MATTER = (NAMESPACE, "VLLM_OMNI_", "VLLM_PLUGINS")
"""The prefixes of this shell's variables that are shown in a report."""
_KEY = "OPENAI_API_KEY"
"""The variable with the API key of upstream's client."""


@dataclass(frozen=True)
class Arm:
    """A setting: its name, and the variables of its servers besides this shell's."""

    name: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """The plan of a series.

    Attributes:
        arms: The baseline and the other arm.
        starts: The number of starts per arm, an even number.
        serve: The server's command, with placeholders.
        bench: The client's command.
        requests: The fixed requests.
        out: The folder for starts, results and logs.
        primary: The key of the primary measure. None means the first known one.
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
        """The arm of each start, as A B B A, so that a drift of the machine affects both arms equally."""
        a, b = self.arms
        return [a, b, b, a] * (self.starts // 2)


def environment(arm: Arm) -> dict[str, str]:
    """The environment of the arm's servers: this shell's variables, overridden by the arm's."""
    return {**os.environ, **arm.environment}


def shown_variables(arm: Arm) -> dict[str, str]:
    """The variables in a report: the arm's, and those of this shell that vLLM-Omni or this package may read."""
    of_shell = {name: value for name, value in os.environ.items() if name.startswith(_MATTER)}
    return redaction.variables({**of_shell, **arm.environment})


def run(plan: Plan, phases: Phases, interrupts: Interrupts) -> tuple[Series, Exception | Interrupted | None]:
    """Measure all starts.

    Returns:
        The series, and the exception that ended it early, or None.
    """
    found: list[Start] = []
    ended: Exception | Interrupted | None = None
    try:
        for place, arm in enumerate(plan.order, 1):
            _start(plan, arm, place, phases, interrupts, found)
    except (Exception, Interrupted) as error:  # the starts that were measured are reported
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
    """Measure one start. It is added to ``measured`` and written before the server is stopped."""
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
        # Without the variables for servers, so that the client is the same in both arms.
        environment={name: value for name, value in os.environ.items() if not name.startswith(NAMESPACE)},
        log=plan.out / "logs" / f"{named}-bench.log",
        interrupts=interrupts,
        stop_timeout_s=5.0,
    )
    try:
        with phases.phase(f"{title}: starting the server"):
            server.start()
        with phases.phase(f"{title}: checking the setting"):
            states.prove(server, arm.name, wanted)
        with phases.phase(f"{title}: benchmark client"):
            found = _result(client, server, result)
        with phases.phase(f"{title}: {len(plan.requests)} fixed requests, checking the setting"):
            with interrupts.at_once():
                answers = _ask(server.url, plan.requests, commands.headers(bench))
            time.sleep(states.SETTLE_S if wanted.enabled else 0.0)
            server.check()
            snapshots = states.prove(server, arm.name, wanted)
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
            states=states.as_data(snapshots),
        )
        start.write(plan.out / "starts" / f"{named}.json")
        measured.append(start)
        measures.check_primary(plan.primary, [start])  # in the first start, and not after hours
    finally:
        with phases.phase(f"{title}: stopping"):
            server.stop()


def _result(client: Child, server: Child, result: Path) -> dict[str, Any]:
    """Run the benchmark client, and read its JSON.

    Args:
        client: The client.
        server: The running server.
        result: The path of the client's JSON.

    Raises:
        MeasureError: The client failed or wrote no measures, or the server ended.
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
    """The answers to the fixed requests, which have the headers of the client."""
    key = None if "authorization" in map(str.lower, headers) else os.environ.get(_KEY)
    own = {"Authorization": f"Bearer {key}"} if key else {}
    return [capture.answer() for capture in ask(url, sent, {**own, **headers})]
