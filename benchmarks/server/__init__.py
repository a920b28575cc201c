"""The whole server on light engines: what a user waits for, at 1 to 64 streams in four waves.

    python -m benchmarks.server [--replicas 4] [--starts 6] [--levels 16,64] [--arms stock,fastpath]

API server, HTTP, front end, orchestrator, metrics and logs are upstream's; the stages are light engines of the
simulated device, which keep the step times of a large model on a few percent of a core, whatever the server does.
Closed loop, chat streaming with audio, Qwen3-Omni. A wave is as many requests as there are streams; the first one
starts at once, later ones start as earlier requests end, which is issue #4561's case.

Each start is a server of its own; arms alternate, each is proved by its state file, and the engines' own lateness is in
every result line: an instrument that was late measured itself. Verdicts are those of ``omni_fastpath.compare.verdict``
over starts, on the rows that were named for it.

Not here yet: the open loop, requests that are not streamed, speech, Qwen3-TTS, the event loops' longest callback.
"""
