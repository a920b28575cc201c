"""``make demo``: what the package is for, on a server whose stages cost next to nothing.

    python -m benchmarks.demo [--starts N] [--quick]

Simulated: the stage engines. Light engines send what Qwen3-Omni's three stages would on eight H100s, upstream's default
YAML four times, on the clock of public measurements. Real, and upstream's own: API server, HTTP and server-sent events,
front end, orchestrator, output processing, metrics and logs. They have the processors to themselves, as on a machine
with GPUs. So what waits here is what waits in the API process. `benchmarks.trust.parity` has real stages.

Each start is one server that is asked three loads: 64 streams of text alone, 64 of text and audio, and arrivals at a
rate. One start of each arm by default, which gives no verdict. With ``--starts 6`` each row gets one.
"""
