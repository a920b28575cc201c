"""How long an output waits on its way, at low load, and how often an idle pipeline wakes.

    python -m benchmarks.latency

One stage. A feeder process sends real raw outputs over ZMQ; vLLM's socket reader decodes them; the real loop, stage
pool, output processor and routing handle them on the orchestrator's thread; the real front-end drain on uvloop hands
them to a request's queue. Four stamps for each: arrived in the client's queue, processing starts, routed, handed over.
"""
