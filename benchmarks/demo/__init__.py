"""``make demo``: what the package is for, on a server whose stages cost next to nothing.

    python -m benchmarks.demo [--starts N] [--quick]

Simulated: the stage engines. Light engines send what Qwen3-Omni's three stages would on eight H100s, upstream's default
YAML four times, on the clock of public measurements. All of them are one process on a few percent of a core. Real, and
upstream's own: API server, HTTP and server-sent events, front end, orchestrator, output processing, metrics and logs.
They have the processors to themselves, as on a machine with GPUs. So what waits here is what waits in the API process,
and what a stage itself costs is not seen. `benchmarks.trust.parity` has real stages.

One start of each server by default, which gives ratios. With ``--starts 6`` each row gets a verdict.
"""
