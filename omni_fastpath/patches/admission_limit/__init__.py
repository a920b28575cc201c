"""Enforces upstream's ``--max-num-queued-reqs``: when the server is full, a request gets an immediate 503.

What:
    With ``--max-num-queued-reqs N`` a request is admitted if it, the engine's unfinished requests and the admitted
    requests that have not reached the engine are at most N. Otherwise the answer is vLLM's ``QueueOverflowError``, a
    503 with ``Retry-After`` (1 to 30 s; none if the request alone needs more than N), before anything is rendered or
    tokenized. A request stops counting when its answer ends or its client disconnects. A request for ``n`` answers, or
    a batch of n, takes n places.
Why:
    vLLM-Omni accepts the flag and prints what it promises, but ``AsyncOmni.check_admission`` is the empty method of its
    base class, and chat and speech do not call it. Beyond the server's capacity all first audio then gets later for as
    long as the load lasts. vLLM itself counts only after rendering, and lets a burst through (vllm issue #58192).
Why not a hook:
    The method could be overridden, but a plugin has no place between a request's body and its rendering.
Scope:
    Chat and speech, batches too, and everything that calls ``check_admission``. Over a web socket each request, or
    sentence of speech, is checked and no place is reserved. ``/v1/realtime``, images, videos and audio of diffusion
    models count and are never refused; duplex sessions do not count. Each of M API servers counts its own requests, so
    they admit up to M times N. Tokens are not counted, and a warning says so if ``--max-num-queued-tokens`` is set.
    Without ``--max-num-queued-reqs`` the patch is ``not_applicable``.
Fragility:
    Relies on ``generate`` to record a request in the engine's ``request_states`` and to submit it without an await in
    between, so that body is pinned. No class declares what is read of the application's state: ``args`` and
    ``engine_client``.
Upstream thread:
    vllm-omni issue #5365 (a limit of concurrency), #2316 (503 beyond it); vllm issue #44933.
Remove when:
    ``AsyncOmni`` has its own ``check_admission``, and chat and speech call it.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Counter, Fit, Patch, Process, Relies, Row, State, Wrap

SERVING = "vllm_omni.entrypoints.openai"
CHAT, BATCH, SPEECH = (f"{SERVING}.{name}" for name in ("serving_chat", "batch_serving", "serving_speech"))
CHATS = "vllm.entrypoints.openai.chat_completion.protocol"
ERRORS = "vllm.entrypoints.serve.engine.serving"

SEAMS: tuple[AnySeam, ...] = (
    Wrap("vllm.engine.protocol", "EngineClient.check_admission", wrapper="wrapped_check_admission"),
    Relies("vllm_omni.entrypoints.async_omni", "AsyncOmni.generate"),
    Wrap(CHAT, "OmniOpenAIServingChat.create_chat_completion", wrapper="wrapped_chat"),
    Wrap(BATCH, "OmniOpenAIServingChatBatch.create_batch_chat_completion", wrapper="wrapped_chat_batch"),
    Wrap(SPEECH, "OmniOpenAIServingSpeech.create_speech", wrapper="wrapped_speech"),
    Wrap(SPEECH, "OmniOpenAIServingSpeech.create_speech_batch", wrapper="wrapped_speech_batch"),
    Wrap(SPEECH, "OmniOpenAIServingSpeech._prepare_speech_generation", wrapper="wrapped_sentence"),
    Relies(ERRORS, "BaseServing.create_error_response"),
    Relies("vllm.engine.arg_utils", "AsyncEngineArgs"),
    Relies("vllm_omni.entrypoints.async_omni", "AsyncOmni"),
    *(Relies(CHATS, name) for name in ("ChatCompletionRequest", "BatchChatCompletionRequest")),
    Relies(f"{SERVING}.protocol.audio", "BatchSpeechRequest"),
)

PATCH = Patch(
    name="admission_limit",
    summary="enforces upstream's --max-num-queued-reqs: an immediate 503 when the server is full",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    requires=("connections",),
    counters=(
        Counter("admitted", "requests that were admitted"),
        Counter("refused", "requests that got a 503"),
        Counter("most_at_once", "most places that were taken, by unfinished and by admitted requests", is_maximum=True),
    ),
    rows=(
        Row(releases=("0.28.0",), state=State.NOT_APPLICABLE, note="vLLM 0.28 has no --max-num-queued-reqs"),
        Fit(
            releases=("0.30.0", "0.32.0rc1"),
            seams=SEAMS,
            of_api_server=tuple(seam.module for seam in SEAMS if seam.module.startswith((SERVING, "vllm.entry"))),
            without_api_server="there is no API server, so no request is checked",
        ),
    ),
)
