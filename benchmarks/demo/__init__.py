"""``make demo``: what the package is for, on a server whose stages cost next to nothing.

    python -m benchmarks.demo [--starts N] [--quick] [--output DIR]
    python -m benchmarks.demo --picture docs/demo.svg

Simulated: the stage engines. Light engines send what Qwen3-Omni's three stages would, on the clock: text tokens, codes,
three outputs without audio before each one with it (issue #4561's queue N N N A). All of them are one process on a few
percent of a core. Real, and upstream's own: API server, HTTP and server-sent events, front end, orchestrator,
output processing, metrics and logs; they have the processors to themselves, as on a machine with GPUs. So what waits
here is what waits in the API process; what a stage itself costs is not seen. `tests.trust.parity` has real stages.

Two starts of each server by default, which give ratios; with ``--starts 6`` each row gets a verdict.
"""
