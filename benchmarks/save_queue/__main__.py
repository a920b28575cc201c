"""Save queue: what slow receivers cost the others, and what ``save_queue_cap`` costs when nobody is slow.

    python -m benchmarks.save_queue component   one stage by itself: nobody slow at 64 and 128 streams, also beside busy
                                                processes; one, two and four slow streams of 64
    python -m benchmarks.save_queue overhead    processor time: the scheduler's thread a step, the lanes a task
    python -m benchmarks.save_queue receiver    the receiver is stopped, a put blocks: bytes on their way
    python -m benchmarks.save_queue text        two of four streams' puts hang: the text of everybody
    python -m benchmarks.save_queue prompt      a prompt of 32,000 tokens: how long it stops the stage
    python -m benchmarks.save_queue server      the whole server: one slow stream of 16; nobody slow at 1, 8 and 32

Arms alternate; each asserts from the patch's counters and states that it is what it says, and every stream's chunks are
compared between arms. The lines go to results/save_queue.jsonl. Payloads are views of the step's batch, as a GPU stage
has them, unless --payloads own says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.save_queue import component, overhead, stalls, text, whole_server
from benchmarks.save_queue.measure import Text
from benchmarks.save_queue.rig import STAGES, stage_configs

QUICK_STALL_S = 4.0
QUICK_TEXT = Text(tokens=60, text_tokens=50, alone_after_s=0.5, seconds=2.0)


def main() -> None:
    """Run one mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_queue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("component", "overhead", "receiver", "text", "prompt", "server"))
    parser.add_argument("--quick", action="store_true", help="small settings: does it run?")
    parser.add_argument("--runs", type=int, help="of each arm")
    parser.add_argument("--streams", type=int, help="component, receiver, overhead: how many")
    parser.add_argument("--slow", type=int, nargs="*", help="component: how many are slow, one after another")
    parser.add_argument("--busy", type=int, nargs="*", help="component: busy processes beside it, one after another")
    parser.add_argument("--stage", type=int, choices=list(STAGES), help="component, receiver, overhead: only this one")
    parser.add_argument("--seconds", type=float, help=f"receiver: of a stall; {stalls.SECONDS:g}")
    parser.add_argument("--configs", type=Path, metavar="FOLDER", help="keep the stages' configs there: 20 s less")
    parser.add_argument("--payloads", choices=("views", "own"), default="views", help="component, overhead, prompt")
    parser.add_argument(
        "--device-type",
        choices=("cpu", "cuda"),
        default="cuda",
        help="component, overhead: what the stage's config calls its device; on cpu the patch copies what waits",
    )
    options = parser.parse_args()
    if options.mode == "server":
        server_plan = whole_server.QUICK if options.quick else whole_server.Plan()
        if options.runs:
            server_plan = dataclasses.replace(server_plan, runs=options.runs)
        whole_server.run(server_plan)
        return
    with tempfile.TemporaryDirectory() as folder:
        component_mode(options, stage_configs(options.configs or Path(folder)))


def component_mode(options: argparse.Namespace, configs: dict[int, Path]) -> None:
    """Run a mode that drives a stage by itself."""
    stages = tuple(STAGES) if options.stage is None else (options.stage,)
    if options.mode == "component":
        plan = component.QUICK if options.quick else component.Plan()
        given = {"slow": options.slow, "busy": options.busy}
        given |= {"runs": options.runs, "idle_runs": options.runs, "streams": options.streams}
        given |= {"idle_streams": (options.streams,) if options.streams else None}
        given |= {"device_type": options.device_type, "payloads": options.payloads}
        plan = dataclasses.replace(plan, **{name: value for name, value in given.items() if value is not None})
        component.run(configs, plan, stages)
    elif options.mode == "receiver":
        seconds = options.seconds or (QUICK_STALL_S if options.quick else stalls.SECONDS)
        stalls.run(configs, seconds=seconds, streams=options.streams or stalls.STREAMS, stage=options.stage or 0)
    elif options.mode == "text":
        text.run_text(configs, QUICK_TEXT if options.quick else Text())
    elif options.mode == "prompt":
        text.run_prompt(configs, text.SHORT_PROMPT if options.quick else text.PROMPT, options.payloads)
    else:
        for stage in stages:
            overhead.run(
                configs,
                streams=(options.streams,) if options.streams else (4, 32) if options.quick else overhead.STREAMS,
                steps=40 if options.quick else overhead.STEPS,
                runs=options.runs or (1 if options.quick else overhead.RUNS),
                stage=stage,
                device_type=options.device_type,
                payloads=options.payloads,
            )


if __name__ == "__main__":
    main()
