"""``python -m benchmarks.front_end``: arms alternate, each in a process of its own; stock runs twice (A/A)."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import benchmarks.front_end
from benchmarks.front_end.ended import ended
from benchmarks.rigs import about, results
from benchmarks.rigs.arm import Arm
from benchmarks.rigs.arms import STOCK, STOCK_AGAIN
from benchmarks.rigs.driver import alternate, parser
from benchmarks.rigs.process_arms import switch_on
from omni_fastpath.declare import Process

_ON = "OMNI_FASTPATH_LEAN_FRONT_END"
MODES = ("full", "line")
ARMS = {
    arm.name: arm
    for arm in (
        STOCK,
        *(Arm(mode, {_ON: "1", f"{_ON}__SUMMARY": mode}) for mode in MODES),
        STOCK_AGAIN,
    )
}
TOKENS = (100, 400, 2000)
TOGETHER = 64
"""Requests that end in one turn of the event loop."""
BURSTS = 5
ROUNDS = 2
"""Of each arm: a process needs ten seconds to import vLLM, and all are to end within three minutes."""
WARM_UP = 20
"""Requests that are not counted: imports, caches, and what the patch compares."""


def measure(tokens: int) -> dict[str, float]:
    """Figures of requests of so many text tokens in this process, whose lines begin with its name as a server's do."""
    import uvloop
    from vllm.utils.system_utils import decorate_logs

    plain = sys.stdout.write
    decorate_logs("APIServer")
    try:
        return uvloop.run(_measure(tokens))
    finally:
        sys.stdout.flush()
        sys.stdout.write = plain  # type: ignore[method-assign]


async def _measure(tokens: int) -> dict[str, float]:
    for number in range(WARM_UP):
        ended(f"chatcmpl-warm-{number}", tokens, number).build_and_log_summary()
    loop_us: list[float] = []
    process_us: list[float] = []
    stalls_ms: list[float] = []
    for burst in range(BURSTS):
        requests = [ended(f"chatcmpl-{burst}-{n:032x}", tokens, n) for n in range(TOGETHER)]
        before = time.process_time_ns()
        stalls_ms.append(await _end_together(requests, loop_us))
        process_us.append((time.process_time_ns() - before) / TOGETHER / 1000)
    return {
        "loop_us": statistics.median(loop_us),
        "process_us": statistics.median(process_us),
        "stall_ms": statistics.median(stalls_ms),
    }


async def _end_together(requests: list[Any], loop_us: list[float]) -> float:
    """All end in one turn of the loop; milliseconds until somebody else has his."""
    loop = asyncio.get_running_loop()

    def end(request: Any) -> None:
        before = time.thread_time_ns()
        request.build_and_log_summary()
        loop_us.append((time.thread_time_ns() - before) / 1000)

    other = loop.create_future()
    for request in requests:
        loop.call_soon(end, request)
    began = time.perf_counter()
    loop.call_soon(lambda: other.set_result(time.perf_counter() - began))
    seconds: float = await other
    return seconds * 1000


def main() -> None:
    """Run one arm (``--arm``), or all and print the table."""
    arguments = parser(benchmarks.front_end.__doc__, ROUNDS, ARMS)
    arguments.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = arguments.parse_args()
    if options.arm:
        switch_on(ARMS[options.arm], Process.SERVER)
        results.say({str(tokens): measure(tokens) for tokens in options.tokens})
        return
    tokens = [str(each) for each in options.tokens]
    found = alternate("benchmarks.front_end", list(ARMS.values()), options.rounds, "--tokens", *tokens)
    figures = {
        "loop_us": "event loop, µs CPU",
        "process_us": "process, µs CPU",
        "stall_ms": f"{TOGETHER} together, ms wall",
    }
    for count in tokens:
        rows = (
            [name, *(results.spread([line[count][figure] for line in lines]) for figure in figures)]
            for name, lines in found.items()
        )
        title = f"The end of a request of {count} text tokens, median of {options.rounds} runs (least to most)"
        results.show(title, ("arm", *figures.values()), rows)
    print(about.line())


if __name__ == "__main__":
    main()
