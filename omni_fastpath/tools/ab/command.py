"""``omni-fastpath ab``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from omni_fastpath.config import refusal
from omni_fastpath.tools.ab import commands, files, measures, redaction, report, requests, series, serving, states
from omni_fastpath.tools.ab.arm import Arm
from omni_fastpath.tools.ab.errors import Interrupted
from omni_fastpath.tools.ab.files import Series
from omni_fastpath.tools.ab.interrupts import Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.verdict import STARTS
from omni_fastpath.tools.tables import console, reader_may_leave

_PIPED_WIDTH = 200

USAGE = """omni-fastpath ab [options] -- SERVE COMMAND -- BENCH COMMAND
       omni-fastpath ab compare [options] FILE FILE ..."""

DESCRIPTION = """\
Two settings of a server, started in turn, measured alike, and what can be said of the difference.

  omni-fastpath ab --starts 6 --a OMNI_FASTPATH=0 --b OMNI_FASTPATH=1 \\
    -- vllm serve MODEL --omni --port {port} \\
    -- vllm bench serve --omni --port {port} --model MODEL --backend openai-chat-omni \\
         --endpoint /v1/chat/completions --percentile-metrics ttft,tpot,itl,e2el,audio_ttfp,audio_rtf \\
         --save-result --result-filename {result}

Both commands are your own and run without a shell. Each server is proved to be its arm by the state files of its own
processes, loaded by your client, and sent fixed requests whose answers are compared: byte by byte on a simulated device
or where the starts of A are identical to each other, elsewhere by errors, ends and lengths.

A verdict is an exact rank test over starts. One measure is named beforehand (--primary), nine others share the
correction for their number (--judge); everything else is shown without a verdict.
"""

EPILOG = """\
placeholders: {port} or {url} in both commands, {result} in the client's (a path for its JSON); also {host}.

exit codes: 0 measured, no measure is worse and the answers are alike; 1 a measure is worse or only the first arm has
it, more requests failed, or the answers differ; 2 usage; 3 the measurement failed; 130 interrupted. After 3 and 130
nothing is left running, and the report has what was measured until then, marked as incomplete.
"""

_COMPARE = """\
Compare the starts in these FILES, of two arms: starts/*.json of one `omni-fastpath ab` or of several. The arm of the
first file is what the other is judged against; --arms says otherwise.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``omni-fastpath ab`` with what follows these words.

    Returns:
        The exit code, as ``EPILOG`` says.

    Raises:
        ConfigError: A usage error.
        OSError: The output cannot be written.
    """
    own, *given = commands.parts(arguments, USAGE)
    if own[:1] == ["compare"]:
        return _compare(_compare_parser().parse_args(own[1:]), given)
    return _ab(_ab_parser().parse_args(own), given)


# ---- Options ----


def _parser(usage: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-fastpath ab",
        usage=usage,
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    keys = ", ".join(measures.PRIMARY)
    parser.add_argument("--primary", metavar="KEY", help=f"the measure named beforehand (default: the first of {keys})")
    parser.add_argument(
        "--judge", metavar="KEY,KEY", help=f"the others that get a verdict (default: at most {measures.OTHERS})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for ab.md, ab.json, each start, results and logs (default: omni-fastpath-ab-DATE)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON in place of the table")
    return parser


def _ab_parser() -> argparse.ArgumentParser:
    parser = _parser(USAGE, DESCRIPTION)
    parser.add_argument("--a", action="append", default=[], metavar="NAME=VALUE", help="a variable of arm A's servers")
    parser.add_argument("--b", action="append", default=[], metavar="NAME=VALUE", help="of arm B's; both repeat")
    parser.add_argument(
        "--starts", type=int, default=STARTS, metavar="N", help=f"of each arm, an even number (default {STARTS})"
    )
    what = f"fixed requests whose answers are compared, of the client's kind (default {requests.COUNT}; 0: none)"
    parser.add_argument("--answers", type=int, default=requests.COUNT, metavar="N", help=what)
    for name, default, what in (
        ("--ready-timeout", serving.READY_TIMEOUT_S, "a server may take to be ready"),
        ("--stop-timeout", serving.STOP_TIMEOUT_S, "it may take to end before it is killed"),
        ("--bench-timeout", None, "the client may take"),
    ):
        until = "any" if default is None else f"{default:g}"
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default {until})")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = _parser("omni-fastpath ab compare [options] FILE FILE ...", _COMPARE)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--arms", metavar="A,B", help="the names of both arms: B is judged against A")
    return parser


def _judged(options: argparse.Namespace) -> list[str]:
    """The keys that were named for a verdict, checked as far as their names tell."""
    judged = [key.strip() for key in (options.judge or "").split(",") if key.strip()]
    for place, key in [("--primary", options.primary), *(("--judge", key) for key in judged)]:
        if key and measures.known(key) is None:
            allowed = "a key of the client's JSON such as median_ttft_ms, p99_e2el_ms, request_throughput"
            raise refusal(place, found=f"{key}, whose direction is not known", allowed=allowed)
    return judged


# ---- Measure both arms ----


def _ab(options: argparse.Namespace, given: Sequence[Sequence[str]]) -> int:
    plan = _plan(options, given)
    progress = console(sys.stderr, _PIPED_WIDTH)
    for arm in plan.arms:
        said = " ".join(map("=".join, redaction.variables(arm.environment).items()))
        progress.print(f"{arm.name}: {said or 'no variable of its own'}")
    order = " ".join(arm.name for arm in plan.order)
    progress.print(f"{len(plan.order)} starts, one after another: {order}; to {plan.out}")
    if plan.no_requests:
        progress.print(f"Answers will not be compared: {plan.no_requests}.")
    interrupts = Interrupts()
    phases = Phases(progress, len(plan.order) * series.PHASES_A_START)
    with interrupts.caught():
        found, ended = series.run(plan, phases, interrupts)
        with interrupts.held():
            code = _reported(found, plan.out, as_json=options.json)
            if ended is not None:
                with reader_may_leave(sys.stderr):
                    progress.print(_last_words(ended), style="bold red")
            interrupts.hurry = False  # all is said: what came meanwhile changes nothing
    return code


def _plan(options: argparse.Namespace, given: Sequence[Sequence[str]]) -> series.Plan:
    if len(given) != 2:
        raise refusal("command line", found=f"{len(given)} bare `--`", allowed=f"two:\n  {USAGE.splitlines()[0]}")
    serve = commands.command("serve command", given[0], [commands.PORT])
    commands.reachable(serve)
    bench = commands.command("bench command", given[1], [commands.PORT, commands.RESULT])
    commands.saves(bench)
    arms = Arm("A", commands.variables("--a", options.a)), Arm("B", commands.variables("--b", options.b))
    for arm in arms:
        # Refused here, and not by a server in the midst of a series.
        states.expected(series.environment(arm), commands.filled(serve, {commands.PORT: 1, commands.HOST: "127.0.0.1"}))
    if options.answers < 0:
        raise refusal("--answers", found=str(options.answers), allowed="0 or more")
    sent, none = requests.fixed(bench, options.answers)
    return series.Plan(
        arms=arms,
        starts=commands.starts(options.starts),
        serve=serve,
        bench=bench,
        requests=sent,
        no_requests=none,
        primary=options.primary,
        judged=_judged(options),
        ready_timeout_s=commands.positive("--ready-timeout", options.ready_timeout),
        stop_timeout_s=commands.positive("--stop-timeout", options.stop_timeout),
        bench_timeout_s=options.bench_timeout and commands.positive("--bench-timeout", options.bench_timeout),
        out=_folder(options),
    )


def _last_words(ended: Exception | Interrupted) -> str:
    if isinstance(ended, Interrupted):
        return "Interrupted: nothing is left running; the report has what was measured until then."
    said = str(ended) if isinstance(ended, series.EXPECTED) else "".join(traceback.format_exception(ended))
    return f"omni-fastpath ab: the measurement failed: {said}"


def _reported(found: Series, folder: Path, *, as_json: bool) -> int:
    judged = report.judge(found)
    written = report.write(judged, folder)
    with reader_may_leave(sys.stdout):
        if as_json:
            print(json.dumps(report.plain(judged), indent=1))  # noqa: T201
        else:
            report.show(judged, out := console(sys.stdout, _PIPED_WIDTH))
            for line in written:
                out.print(line, soft_wrap=True)
    return judged.exit_code


# ---- Compare files ----


def _compare(options: argparse.Namespace, given: Sequence[Sequence[str]]) -> int:
    if given:
        raise refusal("command line", found="a bare `--`", allowed="files, and no command")
    arms = [name.strip() for name in options.arms.split(",")] if options.arms else []
    found = files.series(options.files, arms, options.primary, _judged(options))
    return _reported(found, _folder(options), as_json=options.json)


def _folder(options: argparse.Namespace) -> Path:
    return commands.output_folder(options.out or Path(time.strftime("omni-fastpath-ab-%Y%m%d-%H%M%S")))
