"""The whole server, on light engines as a rule: what a user waits for, closed loop or open, stock, fastpath and limit.

    python -m benchmarks.server [--layout node] [--levels 8,64,128] [--arms poll,event,default] [--starts 6]
    python -m benchmarks.server --load text
    python -m benchmarks.server --layout tts --rate 4,8
    python -m benchmarks.server --parts --levels 64,128 --resume parts-node --minutes 50
    python -m benchmarks.server --capacity --layout tts
    python -m benchmarks.server --release 0.32.0rc1
    git worktree add ../old 6f2a3cd && python -m benchmarks.server --arms default@../old,default

API server, HTTP, front end, orchestrator, metrics and logs are upstream's; the stages are light engines of the
simulated device, which keep the step times of an H100 on a few percent of a core, whatever the server does. ``--engines
stages`` takes real stage engines on the simulated device instead, which need processors of their own; ``--release``
another release of vLLM-Omni, over the packages of the installed one.

Layouts: ``pair``, ``1:2:2``, ``node`` (upstream's default YAML four times), ``own`` (four of each stage, a GPU each) of
Qwen3-Omni by streamed chat; ``tts``, ``tts-4x``, ``tts-8x`` of Qwen3-TTS by streamed speech, on model runner v2. A chat
answer is text with 0.40 s of audio for each token, as issue #4561 shows, or text alone. Closed loop: the first requests
start at once, later ones as earlier ones end. Open loop: requests arrive at a rate, at the same times for every arm.

Arms: ``poll`` (stock's poll loop), ``event`` (its event-driven one, the default of 0.32) and ``default``
(OMNI_FASTPATH=1); the default set with one opt-in patch more (``with-PATCH``), with one patch or one part of a patch
less (``without-NAME``: what requires it is off too); each patch alone with
what it requires (``only-PATCH``). Each with two API processes too (``-2api``), and ``a+b`` is both. Parts have no
options: an object of the patch is replaced in the server (`omni_simulated_device.without`), and its log must say so.
``ARM@FOLDER`` is an arm of another checkout of this repository: of its code is what the server imports as
omni_fastpath, proved by its own ``benchmarks.rigs.server_arms``; device, engines and client are this one's.

``--pace 2`` is for a machine whose cores are half as fast as they were, or as a server's are: steps of the device take
twice as long, arrivals lie twice as far apart, and all times of the table but processor time are what passed over two.
What waits by a timer in the server (the poll loop's millisecond for each replica) counts half.

The limit is what the same engines give with no server around them (`benchmarks.limit`). ``--capacity``: the most
streams at which first audio and underrun stay near it, found by halves, one server for all.

Each start is a server of its own, for all levels; arms alternate, and each is proved by its state files, those of the
light engines included, whose counters must say that payloads were kept back as the arm's ``forward_gate`` asks. How
late engines and client were is measured at each level: one at which either lacked a processor measured this machine and
gets no verdict. Verdicts are those of ``benchmarks.ab.verdict`` over starts. Each level is a family of its
own, in which first audio (p50) is primary, of text alone first text. ``--resume NAME`` goes on with
``results/NAME.jsonl``: a start that is there of the same load counts, and one that was cut off is made again.
"""
