"""``omni-fastpath ab``: the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from omni_fastpath.config import refusal
from omni_fastpath.tools.ab import asked, client, files, measures, report, requests, series, serving, states
from omni_fastpath.tools.ab.about import about
from omni_fastpath.tools.ab.asked import Arm
from omni_fastpath.tools.ab.capture import Request
from omni_fastpath.tools.ab.errors import Interrupted, MeasureError
from omni_fastpath.tools.ab.files import Series, Start
from omni_fastpath.tools.ab.interrupts import Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.streams import outliving
from omni_fastpath.tools.ab.verdict import STARTS

FINE, WORSE, REFUSED, FAILED, INTERRUPTED = 0, 1, 2, 3, 130

USAGE = """omni-fastpath ab [options] -- SERVE COMMAND -- BENCH COMMAND
       omni-fastpath ab measure --url URL --arm NAME --out FILE [options] [-- BENCH COMMAND]
       omni-fastpath ab compare [options] FILE FILE ..."""


DESCRIPTION = """\
Two settings of a server, started in turn, measured alike, and what can be said of the difference.

  omni-fastpath ab --starts 6 --a OMNI_FASTPATH=0 --b OMNI_FASTPATH=1 \\
    -- vllm serve MODEL --omni --port {port} \\
    -- vllm bench serve --omni --port {port} --model MODEL --backend openai-chat-omni \\
         --endpoint /v1/chat/completions --percentile-metrics ttft,tpot,itl,e2el,audio_ttfp,audio_rtf \\
         --save-result --result-filename {result}

Both commands are your own and run without a shell. Starts come as A B B A. Each server is proved to be its arm by the
state files of its own processes, loaded by your client, and sent fixed requests (a fixed seed; chat is greedy), whose
answers are compared: byte by byte on a simulated device, or where the starts of A are identical to each other;
elsewhere errors, ends and lengths, and the report says which it was.

A verdict is an exact rank test over starts. One measure is named beforehand (--primary), nine others share the
correction for their number (--judge); everything else is shown without a verdict.
"""

EPILOG = """\
placeholders: {port} or {url} in both commands, {result} in the client's (a path for its JSON); also {host}.

exit codes: 0 measured, no measure is worse and the answers are alike; 1 a measure is worse or only the first arm has
it, more requests failed, or the answers differ; 2 usage; 3 the measurement failed; 130 interrupted. After 3 and 130
nothing is left running, and the report has what was measured until then, marked as incomplete.
"""

_MEASURE = """\
One start of a server that you started yourself: runs your client against it (if there is one), sends the fixed
requests, and writes what it found to FILE, for `omni-fastpath ab compare`. Start the server anew for each FILE: starts
are what is compared. Its state files are read where the server runs on this machine as this user.
"""

_COMPARE = """\
Compare the starts in these FILES, of two arms: those that `omni-fastpath ab measure` wrote, or starts/*.json of an
earlier `omni-fastpath ab`. The arm of the first file is what the other is judged against; --arms says otherwise.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``omni-fastpath ab`` with what follows these words.

    Returns:
        The exit code, as ``EPILOG`` says.

    Raises:
        ConfigError: A usage error.
        OSError: The output cannot be written.
    """
    found = asked.parts(arguments, 2, USAGE)
    word, rest = (found[0][:1] or [""])[0], found[0][1:]
    if word == "measure":
        return _measure(_measure_parser().parse_args(rest), found[1:])
    if word == "compare":
        return _compare(_compare_parser().parse_args(rest), found[1:])
    return _ab(_ab_parser().parse_args(found[0]), found[1:], shlex.join(["omni-fastpath", "ab", *arguments]))


# ---- Options ----


def _parser(usage: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="omni-fastpath ab",
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _ab_parser() -> argparse.ArgumentParser:
    parser = _parser(USAGE, DESCRIPTION, EPILOG)
    parser.add_argument("--a", action="append", default=[], metavar="NAME=VALUE", help="a variable of arm A's servers")
    parser.add_argument("--b", action="append", default=[], metavar="NAME=VALUE", help="of arm B's; both repeat")
    parser.add_argument(
        "--starts", type=int, default=STARTS, metavar="N", help=f"of each arm, an even number (default {STARTS})"
    )
    parser.add_argument("--port", type=int, metavar="PORT", help="of every server (default: a free one for each)")
    _add_request_options(parser)
    _add_judging_options(parser)
    _add_output_options(parser)
    for name, default, what in (
        ("--ready-timeout", serving.READY_TIMEOUT_S, "a server may take to be ready"),
        ("--stop-timeout", serving.STOP_TIMEOUT_S, "it may take to end before it is killed"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default {default:g})")
    _add_bench_timeout(parser)
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    usage = "omni-fastpath ab measure --url URL --arm NAME --out FILE [options] [-- BENCH COMMAND]"
    parser = _parser(usage, _MEASURE, EPILOG)
    parser.add_argument("--url", required=True, help="of the server, for example http://127.0.0.1:8091")
    parser.add_argument(
        "--arm", required=True, metavar="NAME", help="what the server is: starts of one NAME belong together"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="to write; it must not be there")
    _add_request_options(parser)
    _add_bench_timeout(parser)
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    usage = "omni-fastpath ab compare [options] FILE FILE ..."
    parser = _parser(usage, _COMPARE, EPILOG)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--arms", metavar="A,B", help="the names of both arms: B is judged against A")
    _add_judging_options(parser)
    _add_output_options(parser)
    return parser


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--answers",
        type=int,
        default=requests.COUNT,
        metavar="N",
        help=f"fixed requests whose answers are compared, of the client's kind (default {requests.COUNT}; 0: none)",
    )
    parser.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help='send these: a line each, {"path": "/v1/...", "body": {...}}',
    )


def _add_judging_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--primary",
        metavar="KEY",
        help=f"the measure that is named beforehand, by its key in the client's JSON (default: the first of "
        f"{', '.join(measures.PRIMARY)} that is there)",
    )
    parser.add_argument(
        "--judge", metavar="KEY,KEY", help=f"the others that get a verdict (default: at most {measures.OTHERS})"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="for ab.html, ab.md, ab.json, each start, results and logs (default: omni-fastpath-ab-DATE)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON in place of the table")


def _add_bench_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bench-timeout", type=float, metavar="SECONDS", help="the client may take (default: any)")


def _judged(options: argparse.Namespace) -> list[str]:
    """The keys that were named for a verdict, checked as far as their names tell."""
    judged = [key.strip() for key in (options.judge or "").split(",") if key.strip()]
    for place, named in (("--primary", [options.primary] if options.primary else []), ("--judge", judged)):
        for key in named:
            if measures.known(key) is None:
                raise refusal(
                    place,
                    found=f"{key}, whose direction is not known",
                    allowed="a key of the client's JSON such as median_ttft_ms, p99_e2el_ms, request_throughput",
                )
    return judged


def _folder(options: argparse.Namespace) -> Path:
    named: Path | None = options.out
    return asked.output_folder(named or Path(time.strftime("omni-fastpath-ab-%Y%m%d-%H%M%S")))


# ---- Measure both arms ----


def _ab(options: argparse.Namespace, commands: Sequence[Sequence[str]], command: str) -> int:
    plan = _plan(options, commands, command)
    console = _progress_console()
    for line in _announced(plan):
        console.print(line, highlight=False, markup=False)
    interrupts = Interrupts()
    phases = Phases(console, len(plan.order) * series.PHASES_A_START)
    with interrupts.caught():
        found, ended = series.run(plan, phases, interrupts)
        with interrupts.held():
            code = _reported(found, plan.out, as_json=options.json)
            if ended is not None:
                console.print(_last_words(ended), style="bold red", highlight=False, markup=False)
            interrupts.hurry = False  # all is said: what came meanwhile changes nothing
    return code


def _plan(options: argparse.Namespace, commands: Sequence[Sequence[str]], command: str) -> series.Plan:
    if len(commands) != 2:
        raise refusal("command line", found=f"{len(commands)} bare `--`", allowed=f"two:\n  {USAGE.splitlines()[0]}")
    serve = asked.command("serve command", commands[0], [asked.PORT], [asked.PORT, asked.HOST, asked.URL])
    asked.reachable(serve)
    known = [asked.PORT, asked.RESULT, asked.HOST, asked.URL]
    bench = asked.command("bench command", commands[1], [asked.PORT, asked.RESULT], known)
    asked.saves(bench)
    arms = Arm("A", asked.variables("--a", options.a)), Arm("B", asked.variables("--b", options.b))
    for arm in arms:
        # Refused here, and not by a server in the midst of a series.
        states.expected(series.environment(arm), asked.filled(serve, {asked.PORT: 1, asked.HOST: "127.0.0.1"}))
    sent, none = _requests(options, bench)
    return series.Plan(
        arms=arms,
        starts=asked.starts(options.starts),
        serve=serve,
        bench=bench,
        requests=sent,
        no_requests=none,
        port=asked.port(options.port),
        primary=options.primary,
        judged=_judged(options),
        ready_timeout_s=asked.positive("--ready-timeout", options.ready_timeout),
        stop_timeout_s=asked.positive("--stop-timeout", options.stop_timeout),
        bench_timeout_s=_bench_timeout(options),
        command=shlex.join(asked.shield(shlex.split(command))),
        out=_folder(options),
    )


def _bench_timeout(options: argparse.Namespace) -> float | None:
    return None if options.bench_timeout is None else asked.positive("--bench-timeout", options.bench_timeout)


def _requests(options: argparse.Namespace, bench: Sequence[str]) -> tuple[list[Request], str]:
    if options.answers < 0:
        raise refusal("--answers", found=str(options.answers), allowed="0 or more")
    if options.requests is not None:
        return requests.from_file(options.requests), ""
    return requests.fixed(bench, options.answers)


def _announced(plan: series.Plan) -> list[str]:
    order = plan.order
    lines = [
        f"A: {plan.arms[0]}",
        f"B: {plan.arms[1]}",
        f"{len(order)} starts, one after another: {' '.join(arm.name for arm in order)}; to {plan.out}",
    ]
    if plan.no_requests:
        lines.append(f"Answers will not be compared: {plan.no_requests}.")
    return lines


def _progress_console() -> Console:
    said = outliving(sys.stderr)
    return Console(file=said) if said.isatty() else Console(file=said, width=160, no_color=True)


def _last_words(ended: Exception | Interrupted) -> str:
    if isinstance(ended, Interrupted):
        return "Interrupted: nothing is left running; the report has what was measured until then."
    return _failure(ended)


def _failure(error: Exception) -> str:
    said = str(error) if isinstance(error, series.EXPECTED) else "".join(traceback.format_exception(error))
    return f"omni-fastpath ab: the measurement failed: {said}"


def _reported(found: Series, folder: Path, *, as_json: bool) -> int:
    judged = report.judge(found)
    written = report.write(judged, folder)
    out = outliving(sys.stdout)
    if as_json:
        print(json.dumps(report.plain(judged), indent=1), file=out, flush=True)
        return judged.exit_code
    console = Console(file=out) if out.isatty() else Console(file=out, width=200, no_color=True)
    report.show(judged, console)
    for line in written:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return judged.exit_code


# ---- One start of a server that somebody else started ----


def _measure(options: argparse.Namespace, commands: Sequence[Sequence[str]]) -> int:
    if len(commands) > 1:
        raise refusal("command line", found="two bare `--`", allowed="one, before the bench command, or none")
    if options.out.exists():
        raise refusal("--out", found=f"{options.out}, which is there", allowed="a new file: one for each start")
    url, port = _address(options.url)
    bench: Sequence[str] = ()
    if commands:
        known = [asked.RESULT, asked.PORT, asked.HOST, asked.URL]
        bench = asked.command("bench command", commands[0], [asked.RESULT], known)
        asked.saves(bench)
    sent, none = _requests(options, bench)
    if not bench and not sent:
        raise refusal("command line", found="no bench command and no requests", allowed="one of them, or both")
    bench_timeout_s = _bench_timeout(options)
    interrupts = Interrupts()
    console = _progress_console()
    try:
        with interrupts.caught():
            start = _measured(options, url, port, bench, sent, none, bench_timeout_s, interrupts, console)
    except Exception as error:
        console.print(_failure(error), style="bold red", markup=False)
        return FAILED
    except Interrupted:
        console.print("Interrupted: nothing is left running, and nothing was written.", style="bold red")
        return INTERRUPTED
    start.write(options.out)
    console.print(f"wrote {options.out}: a start of {start.arm}", markup=False, highlight=False)
    return FINE


def _measured(
    options: argparse.Namespace,
    url: str,
    port: int,
    bench: Sequence[str],
    sent: Sequence[Request],
    none: str,
    bench_timeout_s: float | None,
    interrupts: Interrupts,
    console: Console,
) -> Start:
    if not serving.healthy(url):
        raise MeasureError(f"{url}/health is not answered")
    phases = Phases(console, 2)
    result = options.out.with_name(f"{options.out.name}.result").absolute()
    host = url.split("://", 1)[1].rsplit(":", 1)[0]
    values: Mapping[str, object] = {asked.RESULT: result, asked.PORT: port, asked.HOST: host, asked.URL: url}
    found = {}
    log = options.out.with_name(f"{options.out.name}.log")
    try:
        if bench:
            with phases.phase("benchmark client"):
                found = client.run(
                    asked.filled(bench, values),
                    result,
                    environment=series.client_environment(),
                    log=log,
                    interrupts=interrupts,
                    server=None,
                    timeout_s=bench_timeout_s,
                )
        with phases.phase(f"{len(sent)} fixed requests"):
            answers = series.ask(url, sent, asked.headers(bench))
    finally:
        with contextlib.suppress(OSError):
            result.unlink()
    time.sleep(states.SETTLE_S if bench else 0.0)
    pids = _processes(host, port)
    said = states.of_another(pids)
    return Start(
        arm=options.arm,
        about=about(),
        bench=asked.shield(asked.filled(bench, values)),
        measured=measures.read(found),
        result=client.scalars(found),
        failed=series.failed(found),
        answers=answers,
        no_answers=none,
        questions=requests.digest(sent),
        simulated=_is_simulated(pids),
        states=states.told(said),
        states_seen=bool(said),
    )


def _address(url: str) -> tuple[str, int]:
    from urllib.parse import urlsplit  # noqa: PLC0415 - nothing else here needs it

    try:
        found = urlsplit(url)
        port = found.port or (443 if found.scheme == "https" else 80)
    except ValueError:
        found, port = urlsplit(""), 0
    if found.scheme not in ("http", "https") or not found.hostname or found.path not in ("", "/"):
        raise refusal("--url", found=repr(url), allowed="http://HOST:PORT or https://HOST:PORT, without a path")
    host = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
    return f"{found.scheme}://{host}:{port}", port


def _processes(host: str, port: int) -> set[int]:
    """The processes of a server on this machine: who listens, what started it, and what it started."""
    import psutil  # noqa: PLC0415 - as above

    if host not in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]"):  # noqa: S104 - compared, not listened on
        return set()
    pid = serving.listener(port)
    if pid is None:
        return set()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        # With several API servers the one that was started is above those that listen.
        above = first.parent()
        if above is not None and "--omni" in above.cmdline() and "serve" in above.cmdline():
            first = above
        return {first.pid, *(each.pid for each in first.children(recursive=True))}
    return {pid}


def _is_simulated(pids: set[int]) -> bool:
    import psutil  # noqa: PLC0415 - as above

    for pid in pids:
        with contextlib.suppress(psutil.Error):
            return series.is_simulated(psutil.Process(pid).environ())
    return False


# ---- Compare files ----


def _compare(options: argparse.Namespace, commands: Sequence[Sequence[str]]) -> int:
    if commands:
        raise refusal("command line", found="a bare `--`", allowed="files, and no command")
    arms = [name.strip() for name in options.arms.split(",")] if options.arms else []
    found = files.series(options.files, arms, options.primary, _judged(options))
    return _reported(found, _folder(options), as_json=options.json)
