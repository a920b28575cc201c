"""First audio behind a backlog: how long a packet that is ready waits while other stages have queued outputs.

    python -m benchmarks.dispatch.backlog

The real loop and real processing, three stages. The thinker's and the talker's queues hold a backlog; code2wav has the
queue of issue #4561: outputs that nobody hears, then the first audio of each request. Residence is from the loop's
start, when everything is queued, to the routing of each request's first audio. The arm with ``max_items 1`` takes one
raw output from every replica in turn, as stock does, but without stock's waiting.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.rigs.arms import ARMS, FASTPATH, ONE_ITEM, STOCK
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import switch_on
from benchmarks.rigs.results import say, spread
from omni_fastpath.declare import Process
from omni_fastpath.tools.ab import about
from omni_fastpath.tools.ab.quantiles import quantile

REQUESTS = 16
SILENT = 7
"""Raw outputs of code2wav without audio before each request's first audio."""
ROUNDS = 5
CASES = {"talker backlog": (0, 400), "thinker and talker backlog": (200, 400)}


def measure(thinker: int, talker: int) -> dict[str, float]:
    """Milliseconds until the first audio of the requests was routed: median and last."""
    from benchmarks.rigs.inprocess import Pipeline, audio, batch, codes, silent, text

    pipeline = Pipeline()
    names = [f"r{number}" for number in range(REQUESTS)]
    for name in names:
        pipeline.add_request(name)
    pipeline.put(0, *(batch(text(names[n % REQUESTS], n)) for n in range(thinker)))
    pipeline.put(1, *(batch(codes(names[n % REQUESTS])) for n in range(talker)))
    for name in names:
        pipeline.put(2, *(batch(silent(name)) for _ in range(SILENT)), batch(audio(name, 1.0)))
    heard: dict[str, int] = {}
    started_ns = 0
    route = pipeline.orchestrator._route_output

    async def stamped(stage_id: int, replica_id: int, output: Any, state: Any, metrics: Any) -> None:
        await route(stage_id, replica_id, output, state, metrics)
        payload = getattr(output.outputs[0], "multimodal_output", None)
        if stage_id == 2 and payload is not None and payload.get("audio") is not None and payload["audio"].numel():
            heard.setdefault(output.request_id, time.perf_counter_ns())

    pipeline.orchestrator._route_output = stamped
    started_ns = time.perf_counter_ns()
    with pipeline:
        while len(heard) < REQUESTS:
            time.sleep(0.005)
    waits = [(at - started_ns) / 1e6 for at in heard.values()]
    return {"p50": quantile(waits, 0.5), "max": max(waits)}


def main() -> None:
    """Run one arm (``--arm``), or all of them and print the table."""
    options = parser(__doc__, ROUNDS).parse_args()
    if options.arm:
        switch_on(ARMS[options.arm], Process.SERVER)
        measure(1, 1)  # imports and caches
        say({name: measure(*sizes) for name, sizes in CASES.items()})
        return
    arms = (STOCK, FASTPATH, ONE_ITEM)
    results = alternate("benchmarks.dispatch.backlog", arms, options.rounds)
    print(f"\nFirst audio of {REQUESTS} requests, each behind {SILENT} silent outputs: ms, median of {options.rounds}")
    print(f"{'arm':24}" + "".join(f"{name + ', p50':>34}{'max':>26}" for name in CASES))
    for arm in arms:
        cells = []
        for name in CASES:
            for figure, width in (("p50", 34), ("max", 26)):
                found = [run[name][figure] for run in results[arm.name]]
                cells.append(f"{spread(found):>{width}}")
        print(f"{arm.name:24}" + "".join(cells))
    print(about.line())


if __name__ == "__main__":
    main()
