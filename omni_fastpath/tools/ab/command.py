r"""Compare two settings of a server.

It starts the server in each setting in turn, measures it, and judges the
differences.

  omni-fastpath ab --starts 6 \
    --a stock=OMNI_FASTPATH=0 --b fastpath=OMNI_FASTPATH=1 \
    -- vllm serve MODEL --omni --port {port} \
    -- vllm bench serve --omni --port {port} --model MODEL \
         --backend openai-chat-omni --endpoint /v1/chat/completions \
         --dataset-name random --random-input-len 100 \
         --random-output-len 100 --request-rate RATE --num-prompts 300 \
         --percentile-metrics \
           ttft,tpot,itl,e2el,audio_ttfp,audio_rtf,audio_underrun \
         --save-result --result-filename {result}

RATE is the request rate of a busy hour. Without it the client sends all
requests at once, which measures an overloaded server.

--a and --b set a variable, NAME=VALUE. A word before it (stock=NAME=VALUE)
names the setting in the report. ab fills in {port} in both commands, and
{result}, a path for the client's JSON, in the second. No shell is used.

Before and after the load, the state files of a server's processes must show
that it runs its setting. Each server also gets fixed requests. Their answers
are compared byte by byte if all starts of A answer identically, otherwise by
errors, ends and lengths.

A verdict is an exact rank test over starts. One measure is chosen in advance
(--primary). Nine others share a correction for multiple tests. All other
measures have no verdict.

`omni-fastpath ab compare` judges starts from files in the same way:
starts/*.json of one or several runs. The setting of the first file is A.

Exit codes: 0: no measure is worse, and the answers agree. 1: a measure is
worse or exists for A only, more requests failed, or the answers differ.
2: wrong command line. 3: the measurement failed. 4: too few starts for any
verdict, and nothing that means 1. 130: interrupted. After 3 and 130 no process
is left, and the report has what was measured, marked as incomplete.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from omni_fastpath.config import refusal
from omni_fastpath.tools.ab import commands, files, measures, report, series, states
from omni_fastpath.tools.ab.interrupts import Interrupted, Interrupts
from omni_fastpath.tools.ab.phases import Phases
from omni_fastpath.tools.ab.verdict import STARTS
from omni_fastpath.tools.tables import console, reader_may_leave

USAGE = """omni-fastpath ab [options] -- SERVE COMMAND -- BENCH COMMAND
       omni-fastpath ab compare [options] FILE FILE ..."""


def main(arguments: Sequence[str]) -> int:
    """Run ``omni-fastpath ab`` with these arguments.

    Returns:
        The exit code.

    Raises:
        ConfigError: A usage error.
        OSError: The output cannot be written.
    """
    own, *given = commands.parts(arguments, USAGE)
    is_compare = own[:1] == ["compare"]
    options = _parser(is_compare=is_compare).parse_args(own[is_compare:])
    if len(given) != (0 if is_compare else 2):
        raise refusal("command line", found=f"{len(given)} bare `--`", allowed=USAGE)
    if is_compare:
        found = files.series(options.files, options.primary)
        measures.check_primary(options.primary, found.starts)
        return _reported(report.judge(found), _output_folder(options.out))
    return _measure(_plan(options, *given))


def _parser(*, is_compare: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-fastpath ab",
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    first = f"'{measures.title(measures.JUDGED[0])}'"
    parser.add_argument("--primary", metavar="MEASURE", help=f"the measure chosen in advance (default: {first})")
    folder = "for reports, starts, results and logs (default: omni-fastpath-ab-DATE)"
    default = time.strftime("omni-fastpath-ab-%Y%m%d-%H%M%S")
    parser.add_argument("--out", default=default, metavar="FOLDER", help=folder)
    if is_compare:
        parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
        return parser
    setting = "[LABEL=]NAME=VALUE"
    parser.add_argument(
        "--a", action="append", default=[], metavar=setting, help="a variable of A's servers; may be repeated"
    )
    parser.add_argument("--b", action="append", default=[], metavar=setting, help="a variable of B's")
    parser.add_argument(
        "--starts", type=int, default=STARTS, metavar="N", help=f"starts per setting, an even number (default {STARTS})"
    )
    return parser


def _plan(options: argparse.Namespace, serve: Sequence[str], bench: Sequence[str]) -> series.Plan:
    commands.check("serve command", serve, [commands.PORT])
    commands.check_reachable(serve)
    commands.check("bench command", bench, [commands.PORT, commands.RESULT])
    arms = series.Arm(*commands.arm("A", "--a", options.a)), series.Arm(*commands.arm("B", "--b", options.b))
    if arms[0].name == arms[1].name:
        raise refusal("--b", found=f"the name {arms[1].name}", allowed="another name than the other setting's")
    for arm in arms:
        # Refuse it here, before a server of the series does.
        states.expected(series.environment(arm), serve)
    if not 2 <= options.starts <= 1000 or options.starts % 2:
        allowed = "an even number from 2 to 1000, because the order is A B B A"
        raise refusal("--starts", found=str(options.starts), allowed=allowed)
    return series.Plan(
        arms=arms,
        starts=options.starts,
        serve=serve,
        bench=bench,
        requests=commands.fixed(bench),
        primary=options.primary,
        out=_output_folder(options.out),
    )


def _output_folder(name: str) -> Path:
    path = Path(name)
    if not name or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise refusal("--out", found=repr(name), allowed="a new or empty folder")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _measure(plan: series.Plan) -> int:
    progress = console(sys.stderr)
    for arm in plan.arms:
        progress.print(f"{arm.name}: {' '.join(map('='.join, series.shown_variables(arm).items())) or 'no variables'}")
    order = " ".join(arm.name for arm in plan.order)
    count, load_s = len(plan.order), commands.load_s(plan.bench)
    load = f"about {-(-count * load_s // 60):.0f} min of load" if load_s else f"{count} loads"
    for warning in commands.warnings(plan.bench):
        progress.print(warning, style="yellow")
    progress.print(f"{count} starts, one after another: {order}; to {plan.out}")
    progress.print(f"It takes {load} and {count} starts and stops of your server. The accelerators must be idle.")
    interrupts = Interrupts()
    with interrupts.caught():
        found, ended = series.run(plan, Phases(progress, len(plan.order) * series.PHASES_A_START), interrupts)
        code = _reported(report.judge(found), plan.out)
        if ended is not None:
            with reader_may_leave(sys.stderr):
                progress.print(_last_words(ended), style="bold red")
    return code


def _last_words(ended: Exception | Interrupted) -> str:
    if isinstance(ended, Interrupted):
        return "Interrupted. No process is left, and the report has what was measured until then."
    reason = str(ended) if isinstance(ended, series.EXPECTED) else "".join(traceback.format_exception(ended))
    return f"omni-fastpath ab: the measurement failed: {reason}"


def _reported(judged: report.Report, folder: Path) -> int:
    written = report.write(judged, folder)
    with reader_may_leave(sys.stdout):
        out = console(sys.stdout)
        report.show(judged, out)
        for line in written:
            out.print(line, soft_wrap=True)
        out.print(report.notes(judged)[0], style="bold")
    return judged.exit_code
