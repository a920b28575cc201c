"""Save queue: what one slow receiver costs the others, and what ``save_queue_cap`` costs when nobody is slow.

    python -m benchmarks.save_queue component   one stage by itself: one slow stream of 64; nobody slow at 64 and 128
    python -m benchmarks.save_queue server      the whole server: one slow stream of 16; nobody slow at 1, 8 and 32
    python -m benchmarks.save_queue receiver    the receiver is stopped, a put blocks: bytes on their way
    python -m benchmarks.save_queue overhead    microseconds a step on the scheduler's thread

Arms alternate; each asserts from the patch's counters and states that it is what it says, and every stream's chunks are
compared between arms. The lines go to results/save_queue.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from benchmarks.save_queue import component, overhead, stalls, whole_server
from benchmarks.save_queue.rig import STAGES, stage_configs

QUICK_STALL_S = 4.0


def main() -> None:
    """Run one mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_queue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("component", "server", "receiver", "overhead"))
    parser.add_argument("--quick", action="store_true", help="small settings: does it run?")
    parser.add_argument("--runs", type=int, help="of each arm")
    parser.add_argument("--streams", type=int, help="component, receiver, overhead: how many")
    parser.add_argument("--stage", type=int, choices=list(STAGES), help="component, receiver, overhead: only this one")
    parser.add_argument("--seconds", type=float, help=f"receiver: of a stall; {stalls.SECONDS:g}")
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
        configs = stage_configs(Path(folder))
        if options.mode == "component":
            plan = component.QUICK if options.quick else component.Plan()
            if options.runs:
                plan = dataclasses.replace(plan, runs=options.runs)
            if options.streams:
                plan = dataclasses.replace(plan, streams=options.streams, idle_streams=(options.streams,))
            plan = dataclasses.replace(plan, device_type=options.device_type)
            component.run(configs, plan, tuple(STAGES) if options.stage is None else (options.stage,))
        elif options.mode == "receiver":
            seconds = options.seconds or (QUICK_STALL_S if options.quick else stalls.SECONDS)
            stalls.run(configs, seconds=seconds, streams=options.streams or stalls.STREAMS, stage=options.stage or 0)
        else:
            streams = (options.streams,) if options.streams else (4, 32) if options.quick else overhead.STREAMS
            steps = 40 if options.quick else overhead.STEPS
            runs = options.runs or (1 if options.quick else 3)
            stage, device_type = options.stage or 0, options.device_type
            overhead.run(configs, streams=streams, steps=steps, runs=runs, stage=stage, device_type=device_type)


if __name__ == "__main__":
    main()
