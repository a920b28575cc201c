"""``python -m benchmarks.ab``."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmarks.ab
from benchmarks.ab import answers, states, verdict
from benchmarks.ab.capture import Request, chat_request, speech_request
from benchmarks.ab.serving import Child, MeasureError, Serving, free_port, tail
from benchmarks.rigs import about, results, side_by_side, whole_server
from benchmarks.rigs.arm import Arm, WrongArmError, clean
from benchmarks.rigs.captures import run_closed_loop
from benchmarks.rigs.side_by_side import guarded, positive
from omni_fastpath import config
from omni_fastpath.config import ConfigError
from omni_fastpath.patches import PATCHES

JUDGED = (
    "median_audio_ttfp_ms",
    "median_ttft_ms",
    "median_e2el_ms",
    "request_throughput",
    "p99_audio_ttfp_ms",
    "p99_ttft_ms",
    "p99_e2el_ms",
    "p99_audio_underrun_s",
    "median_audio_rtf",
    "audio_throughput",
)
"""Keys of the client's result. The first that was measured is primary, unless another one is named."""
_MEASURE = re.compile(r"(mean|median|p[\d.]+)_\w+_(ms|s|rtf)|\w+_(throughput|goodput)")
_HIGHER = ("throughput", "goodput")
_MAY_BE_ZERO = re.compile("underrun|throughput|goodput")
"""Elsewhere upstream's client writes 0 for what it has no value of."""

PROMPTS = [f"Explain in {count} sentences how bread is made." for count in range(1, 9)]
MAX_TOKENS, SEED = 64, 0


@dataclass(frozen=True)
class Setting(Arm):
    """An arm: variables, and the deploy YAML of its server's command, if there is one."""

    deploy: str | None = None

    @property
    def enabled(self) -> frozenset[str]:
        """The patches that its variables and its YAML switch on."""
        file = None if self.deploy is None else Path(self.deploy)
        found = config.resolve_file(file, {**clean(), **self.environment}, PATCHES)
        if found.unknown:
            raise ConfigError("\n".join(found.unknown))
        return frozenset(found.enabled)


@dataclass(frozen=True)
class Plan:
    """The two commands with their placeholders, the fixed requests, and the primary measure if it was named."""

    serve: Sequence[str]
    bench: Sequence[str]
    requests: Sequence[Request]
    primary: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the starts and print the table; the exit codes are on the page of the package."""
    parser = _parser()
    own, *commands = _parts(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(own)
    needed = (("{port}",), ("{port}", "{result}"))
    if len(commands) != 2 or not all(
        word in " ".join(c) for c, words in zip(commands, needed, strict=True) for word in words
    ):
        parser.error(
            "two commands, each after a bare `--`: a server with {port}, and a client with {port} and {result}"
        )
    serve, bench = commands
    try:
        arms = [setting(name, given, serve) for name, given in (("A", options.a), ("B", options.b))]
        plan = Plan(serve, bench, fixed(bench), options.primary)
        for arm in arms:  # refuse a wrong one before the first start
            results.progress(f"{arm.name}: {', '.join(sorted(arm.enabled)) or 'stock'}")
    except (ConfigError, ValueError, OSError) as error:
        parser.error(str(error))

    def run(console: Console) -> int:
        found = whole_server.run_starts("ab", arms, options.starts, lambda arm, log: measure(plan, arm, log))
        return show(found, options.primary, console)

    return guarded("The comparison", run)


def _parser() -> argparse.ArgumentParser:
    usage = "python -m benchmarks.ab [options] -- SERVE COMMAND -- BENCH COMMAND"
    parser = side_by_side.parser("benchmarks.ab", benchmarks.ab.__doc__, usage=usage)
    form = "NAME=VALUE|FILE.yaml"
    parser.add_argument("--a", action="append", default=[], metavar=form, help="of the setting A; may be repeated")
    parser.add_argument("--b", action="append", default=[], metavar=form, help="of the setting B")
    parser.add_argument("--starts", type=positive, default=verdict.STARTS, help="of each setting (default %(default)s)")
    parser.add_argument("--primary", metavar="KEY", help="the primary measure, a key of the client's result")
    return parser


def _parts(words: Sequence[str]) -> list[list[str]]:
    """The words between bare ``--``: options, and commands."""
    found: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            found.append([])
        else:
            found[-1].append(word)
    return found


def _option(words: Sequence[str], *names: str) -> str | None:
    """The last value of an option in a command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*names, dest="value")
    value: str | None = parser.parse_known_args(list(words))[0].value
    return value


def setting(name: str, given: Sequence[str], serve: Sequence[str]) -> Setting:
    """The arm of these variables and deploy YAML.

    Raises:
        ValueError: One is neither.
    """
    deploy, variables = _option(serve, "--deploy-config"), {}
    for each in given:
        variable, equals, value = each.partition("=")
        if each.endswith((".yaml", ".yml")) and not equals:
            deploy = each
        elif equals and variable.isidentifier():
            variables[variable] = value
        else:
            raise ValueError(f"--{name.lower()}: found {each!r}, allowed: NAME=VALUE, or the path of a deploy YAML")
    return Setting(" ".join([name, *given]), variables, None, deploy=deploy)


def fixed(bench: Sequence[str]) -> list[Request]:
    """The fixed requests, of the client's kind, with its model and extra body.

    Raises:
        ValueError: The extra body is not JSON.
    """
    is_speech = "speech" in (_option(bench, "--endpoint") or _option(bench, "--backend") or "")
    model, body = _option(bench, "--served-model-name") or _option(bench, "--model"), {"stream": True}
    body |= json.loads(_option(bench, "--extra-body") or "{}") | ({"model": model} if model else {})
    asked = [speech_request(each) if is_speech else chat_request(each, max_tokens=MAX_TOKENS) for each in PROMPTS]
    return [replace(each, body={**each.body, "seed": SEED, **body}) for each in asked]


# ---- A start ----


def measure(plan: Plan, arm: Setting, log: Path) -> dict[str, Any]:
    """One start: what the client measured, and the answers to the fixed requests.

    Raises:
        MeasureError: The server or the client failed, or measured nothing.
        WrongArmError: The server does not run its setting.
    """
    port, result = free_port(), log.with_suffix(".json")
    words = [each.replace("{port}", str(port)) for each in plan.serve]
    if arm.deploy is not None and arm.deploy != _option(words, "--deploy-config"):
        words += ["--deploy-config", arm.deploy]
    # Off in words, so that a state file says so.
    environment = {**clean(), **arm.environment, **({} if arm.enabled else {"OMNI_FASTPATH": "0"})}
    server = Serving(command=words, port=port, environment=environment, log=log)
    words = [each.replace("{port}", str(port)).replace("{result}", str(result)) for each in plan.bench]
    client = Child(what="client", command=words, environment=clean(), log=log.with_suffix(".client"), stop_timeout_s=5)
    try:
        server.start()
        _prove(server, arm)
        try:
            client.start()
            status = client.wait(server)
        finally:
            client.stop()
        measured = _read(result) if status == 0 else {}
        if not any(map(_MEASURE.fullmatch, measured)):
            raise MeasureError(f"the client ended with status {status} and measured nothing{tail(client.log)}")
        if plan.primary is not None and plan.primary not in measured:  # said in the first start, and not after hours
            known = ", ".join(filter(_MEASURE.fullmatch, measured))
            raise MeasureError(f"--primary: found {plan.primary}, measured: {known}")
        answered = [each.answer() for each in run_closed_loop(server.url, plan.requests)]
        server.check()
        counters = _prove(server, arm)
    finally:
        server.stop()
    return {"measured": measured, "answers": answered, "counters": counters, "start_s": server.start_s}


def _prove(server: Serving, arm: Setting) -> dict[str, dict[str, dict[str, int]]]:
    """The counters of a server's processes, after a check that it runs its setting."""
    time.sleep(states.SETTLE_S)
    found = states.of_processes(server.tree())
    named = frozenset(patch.name for patch in PATCHES if patch.env in arm.environment) & arm.enabled
    if problems := states.check(found, arm.enabled, named):
        raise WrongArmError(f"the server does not run the setting {arm.name}:\n  " + "\n  ".join(problems))
    return {
        f"{each.process_name} {each.pid}": {name: dict(one.counters) for name, one in each.patches.items()}
        for each in found
    }


def _read(result: Path) -> dict[str, float]:
    """The client's numbers; none where it wrote nothing that can be read."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    except (OSError, ValueError, AttributeError):
        return {}


# ---- The table ----


def values(starts: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """A measure in each start; NaN where a start has none."""
    found = (start["measured"].get(key, math.nan) for start in starts)
    return [each if each or _MAY_BE_ZERO.search(key) else math.nan for each in found]


def show(found: Mapping[str, Sequence[Mapping[str, Any]]], primary: str | None, console: Console) -> int:
    """Print the table of the starts of two arms; the exit code."""
    (a, of_a), (b, of_b) = found.items()
    keys = [key for key in of_a[0]["measured"] if _MEASURE.fullmatch(key)]
    keys = [key for key in keys if any(each == each for each in (*values(of_a, key), *values(of_b, key)))]  # noqa: PLR0124 - NaN
    judged = [key for key in dict.fromkeys([*filter(None, [primary]), *JUDGED]) if key in keys][: len(JUDGED)]
    rows = {("", key): verdict.Measure(key, "higher" if key.endswith(_HIGHER) else "lower") for key in judged}
    figures = [[{"": {key: values([start], key)[0] for key in judged}} for start in each] for each in (of_a, of_b)]
    said = whole_server.judge(figures[0], figures[1], rows)
    table = [
        [key, _spread(values(of_a, key)), _spread(values(of_b, key)), _ratio(key, of_a, of_b), str(said.get(key, ""))]
        for key in (*judged, *(key for key in keys if key not in judged))
    ]
    results.show(
        f"{len(of_a)} and {len(of_b)} starts: median (least to most)", ("measure", a, b, "B / A", "verdict"), table
    )
    if said:
        console.print(verdict.legend(rows["", judged[0]], len(judged) - 1, min(len(of_a), len(of_b))))
    differences, sentence = answers.compare(*([start["answers"] for start in each] for each in (of_a, of_b)))
    failed = [sum(start["measured"].get("failed", 0) for start in each) for each in (of_a, of_b)]
    console.print(f"{sentence} Failed requests of the client: {failed[0]:g} and {failed[1]:g}.", markup=False)
    console.print(about.line(), markup=False)
    worse = [key for key, each in said.items() if each.word == "worse"]
    lost = [key for key in judged if math.isnan(sum(values(of_b, key))) and not math.isnan(sum(values(of_a, key)))]
    if lost:
        console.print(f"MISSING in starts of B: {', '.join(lost)}", markup=False)
    return int(bool(differences or worse or lost or failed[1] > failed[0]))


def _spread(of: Sequence[float]) -> str:
    known = [each for each in of if not math.isnan(each)]
    return f"{statistics.median(known):.4g} ({min(known):.4g} to {max(known):.4g})" if known else "-"


def _ratio(key: str, of_a: Sequence[Mapping[str, Any]], of_b: Sequence[Mapping[str, Any]]) -> str:
    ratio = verdict.ratio(values(of_a, key), values(of_b, key))
    return "-" if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    sys.exit(main())
