"""The whole server at concurrency 1 to 32, stock and fastpath: is it anywhere worse?

    python -m benchmarks.concurrency

Qwen3-Omni, one replica a stage, on the simulated device with the step times of a large model, where the orchestrator is
mostly idle. Each start is a server of its own; arms alternate. ``A/A`` is the widest ratio of two starts of one arm: a
description. The verdict is that of ``omni_fastpath.compare.verdict`` over starts, on the rows that were named for it;
one row more among them, and six starts an arm could not tell all of them.
"""
