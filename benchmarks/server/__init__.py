"""The whole server, on light engines as a rule: what a user waits for, closed loop or open, stock and fastpath.

    python -m benchmarks.server [--arms stock,fastpath] [--levels 16,64] [--starts 6]
    python -m benchmarks.server --loop open --rate 4,8
    python -m benchmarks.server --model qwen3_tts --levels 32,64,128
    python -m benchmarks.server --replicas 1:3:1 --levels 64,128 --vary 0.5
    python -m benchmarks.server --talker-us 800
    python -m benchmarks.server --release 0.28.0

API server, HTTP, front end, orchestrator, metrics and logs are upstream's; the stages are light engines of the
simulated device, which keep the step times of a large model on a few percent of a core, whatever the server does.
``--engines stages`` takes real stage engines on the simulated device instead, which need processors of their own;
``--release`` another release of vLLM-Omni, over the packages of the installed one.

Loads: Qwen3-Omni by chat, streamed (``--api chat``) or not (``chat-whole``); Qwen3-TTS's two stages by streamed speech,
on model runner v2, where the talker sends only ends. A chat answer has 0.40 s of audio for each text token, as issue
#4561 shows; ``--answers short`` has a fifth of that. ``--talker-us 800`` lengthens a talker's step by as much for each
request of its batch as an H100's; without it the step hardly grows, and the API process gets more outputs than GPUs
send. Closed loop: a wave is as many requests as there are streams; the first one starts at once, later ones start as
earlier requests end, which is issue #4561's case. Open loop: requests arrive at a rate, at the same times for every
arm. ``--audio-in`` lets one request in four bring a recording, in base64, as users of Qwen3-Omni do (light engines take
its tokens and hear nothing); first pieces and gaps are then those of the others.

Arms: ``stock`` (poll loop), ``event`` (upstream's event-driven one, the default of 0.30 for Qwen3-TTS) and ``fastpath``
(its default set), each without statistics too (``-nolog``) and with two API processes (``-2api``); the default set
with one opt-in patch more (``with-NAME``) or one patch less (``without-NAME``: what requires it is off too), and each
patch alone with what it requires (``only-NAME``). With several API processes, processor time by thread is summed.

Replicas: as many of each stage (``--replicas 4``), or thinker, talker and code2wav by themselves (``1:2:1``, as issue
#4469 has them). Each replica has slots for 128 requests.

Each start is a server of its own; arms alternate, each is proved by its state files, and the engines' own lateness is
in every result line: an instrument that was late measured itself. The process of the light engines has a state file
too, and its counters must say that payloads were kept back as the arm's ``forward_gate`` asks. Verdicts are those of
``omni_fastpath.tools.ab.verdict`` over starts. Each level is a family of its own, in which first audio (p50) is
primary.
"""
