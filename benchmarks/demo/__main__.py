"""``python -m benchmarks.demo``: serve Qwen3-Omni on light engines, stock and fastpath in turn, and compare."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import benchmarks.demo
from benchmarks.ab import verdict
from benchmarks.ab.verdict import Measure
from benchmarks.rigs import results
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.captures import digest
from benchmarks.rigs.side_by_side import guarded, parser, positive
from benchmarks.rigs.whole_server import Rows, judge, run_starts
from benchmarks.server.arms import STOCK, USUAL
from benchmarks.server.figures import Figure, better
from benchmarks.server.load import Load
from benchmarks.server.measure import Start, run_level, serving, unfit
from benchmarks.server.report import Found, alike, median_of, shown

LOADS: Mapping[str, Load] = {
    "text": Load(levels=(64,), kind="text"),
    "audio": Load(levels=(64,)),
    "open": Load(levels=(3,), loop="open", requests=36),
}
QUICK: Mapping[str, Load] = {
    "text": Load(levels=(4,), kind="text", tokens=20),
    "audio": Load(levels=(4,), tokens=20),
    "open": Load(levels=(4,), tokens=20, loop="open", requests=8),
}
SECONDS = {"start": 25, "text": 15, "audio": 35, "open": 22}
"""How long a step takes about, in the order of a start's steps."""
ROWS = (
    ("open", Figure.TEXT),
    ("audio", Figure.TEXT_P99),
    ("audio", Figure.AUDIO_P99),
    ("audio", Figure.DRY_P99),
    ("text", Figure.RATE),
    ("audio", Figure.PROCESS_MS),
)
"""Chosen before any run; the second one is the sentence, and primary."""
HEADS = {"poll": "stock, poll", "event": "stock, event-driven", "default": "with omni-fastpath"}


def called(loads: Mapping[str, Load], name: str) -> str:
    """What a row calls a load."""
    [level] = loads[name].levels
    return f"{level:g} requests/s" if name == "open" else f"{level:g} streams, text{' + audio' * (name == 'audio')}"


def screen(found: Found, loads: Mapping[str, Load]) -> list[str]:
    """The lines of the end: at most 24 of at most 100 columns."""
    starts = min(map(len, found.values()))
    first = (ROWS[1], *(row for row in ROWS if row is not ROWS[1]))  # the primary one
    measures: Rows = {(load, name): Measure(f"{name} {load}", better(name)) for load, name in first}
    figures = {arm: [start["figures"] for start in each] for arm, each in found.items()}
    said = [judge(figures[stock], figures["default"], measures) for stock in STOCK]
    bad = {
        f"{arm}: {why}"
        for arm, each in found.items()
        for s in each
        for of in s["figures"].values()
        if (why := unfit(of))
    }
    lines = [f"{'':53}" + "".join(f"{head:>12}" for head in ("stock poll", "stock event", "fastpath"))]
    for load, name in ROWS:
        medians = {arm: median_of(found[arm], load, name) for arm in HEADS}
        lines.append(f"{name:28}{called(loads, load):25}" + "".join(f"{shown(each):>12}" for each in medians.values()))
        best = (max if name is Figure.RATE else min)(STOCK, key=medians.__getitem__)
        given = said[STOCK.index(best)].get(measures[load, name].name)
        if given and starts >= verdict.STARTS and not bad:
            lines[-1] += f"  {given.word if given.word in ('better', 'worse') else 'none'}"
    poll, event, ours = (f"{median_of(found[arm], *ROWS[1]) / 1000:.1f} s" for arm in HEADS)
    [level] = loads["audio"].levels
    lines += [
        "",
        f"{level:g} streams: the first word of one answer in a hundred takes {poll} on stock ({event} with its",
        f"event-driven loop), {ours} with the plugin.",
        *alike(found).splitlines(),
    ]
    if bad:
        lines.append(f"THIS RUN MEASURED THIS MACHINE, not the plugin: {'; '.join(sorted(bad))}"[:100])
    lines += [
        "",
        "Simulated: the stages (eight H100s, outputs on the clock). API server, HTTP, front end and",
        "orchestrator are vLLM-Omni's own.",
    ]
    if starts < verdict.STARTS:
        few = f"{starts} start{'s' * (starts > 1)} of each"
        lines.append(f"{few} is no verdict; make demo ARGS='--starts {verdict.STARTS}' gives them.")
    return [*lines, "Next: pip install . in your server's environment; OMNI_FASTPATH=1 vllm serve MODEL --omni"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0: the table is true and the arms answered alike. 1: it could not be measured, or they did not. 2: usage.
        130: interrupted.
    """
    command = parser("benchmarks.demo", benchmarks.demo.__doc__)
    count = f"starts of each server (default 1; {verdict.STARTS} for verdicts)"
    command.add_argument("--starts", type=positive, default=1, metavar="N", help=count)
    command.add_argument("--quick", action="store_true", help="a small load: tries the demo itself")
    options = command.parse_args(argv)
    loads = QUICK if options.quick else LOADS

    def body(console: Console) -> int:
        bar = Progress(console=console, disable=not console.is_terminal, transient=True)
        left = bar.add_task("", total=sum(SECONDS.values()) * len(USUAL) * options.starts)

        def step(arm: Arm, name: str, what: str) -> None:
            text = f"{HEADS[arm.name]}: {what}, about {SECONDS[name]} s"
            bar.update(left, description=text)
            if bar.disable:
                results.progress(text)

        def start(arm: Arm, log: Path) -> Start:
            figures, answers = {}, {}
            step(arm, "start", "the server starts")
            with serving(arm, loads["audio"], log) as server:
                bar.advance(left, SECONDS["start"])
                for name, load in loads.items():
                    step(arm, name, called(loads, name))
                    figures[name], captures = run_level(server, load, load.levels[0], log)
                    answers[name] = [digest(capture) for capture in captures]
                    bar.advance(left, SECONDS[name])
            return {"figures": figures, "answers": answers}

        with bar:
            found = run_starts("demo", USUAL, options.starts, start)
        for line in screen(found, loads):
            console.print(line, markup=False, highlight=False)
        return int("DIFFER" in alike(found))

    return guarded("The demo", body)


if __name__ == "__main__":
    sys.exit(main())
