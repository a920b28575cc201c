"""Save queue: what slow receivers cost the others, and what ``save_queue_cap`` costs when nobody is slow.

    python -m benchmarks.save_queue idle        one stage by itself, nobody slow, 64 and 128 streams
    python -m benchmarks.save_queue unfetched   one of 16 streams is not fetched: text of all, bytes in shared memory
    python -m benchmarks.save_queue put         a put hangs: text of all
    python -m benchmarks.save_queue server      the whole server: none, one, two and four slow of 16 streams

Arms alternate, but for the servers, which are started one after another; each asserts from queue and states that it is
what it says, and every stream's answer is compared between arms. The lines go to results/save_queue.jsonl.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.save_queue import component, whole_server
from benchmarks.save_queue.rig import STAGES, stage_configs


def main() -> None:
    """Run one mode."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_queue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("idle", "unfetched", "put", "server"))
    parser.add_argument("--runs", type=int, default=4, help="idle, server: of each arm; 4")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 128], help="idle: one after another")
    parser.add_argument("--slow", type=int, nargs="+", default=[0, 1, 2, 4], help="server: one after another")
    parser.add_argument("--stage", type=int, choices=list(STAGES), help="idle: only this one; server: which is slow; 0")
    parser.add_argument("--seconds", type=float, default=10.0, help="unfetched, put: for how long; 10")
    parser.add_argument("--configs", type=Path, metavar="FOLDER", help="keep the stages' configs there: 20 s less")
    options = parser.parse_args()
    if options.mode == "server":
        whole_server.run(options.slow, options.runs, options.stage or 0)
        return
    with tempfile.TemporaryDirectory() as folder:
        configs = stage_configs(options.configs or Path(folder))
        if options.mode == "idle":
            stages = tuple(STAGES) if options.stage is None else (options.stage,)
            component.idle(configs, options.streams, options.runs, stages)
        else:
            component.hang(configs, options.mode, options.seconds)


if __name__ == "__main__":
    main()
