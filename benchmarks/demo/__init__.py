"""``make demo``: what the package is for, on a server whose stages cost next to nothing.

    python -m benchmarks.demo [--starts N] [--quick] [--output DIR]
    python -m benchmarks.demo --picture docs/demo.svg

Simulated: the stage engines. Light engines send what Qwen3-Omni's three stages would, on the clock, with the step times
and the answers of `benchmarks.server`. All of them are one process on a few percent of a core. Real, and upstream's
own: API server, HTTP and server-sent events, front end, orchestrator, output processing, metrics and logs. They have
the processors to themselves, as on a machine with GPUs. So what waits here is what waits in the API process, and what a
stage itself costs is not seen. `tests.trust.parity` has real stages.

Two loads, each on servers of its own. First a closed loop, which shows what a server sustains. Then requests arrive at
a rate below the median of what stock sustained in all of its starts, the same requests at the same times for both.

Two starts of each server and load by default, which give ratios. With ``--starts 6`` each row gets a verdict.
"""
