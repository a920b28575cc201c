"""Upstream's ``--max-num-queued-reqs`` is held: who comes when the server is full is told so at once, with a 503.

What:
    With ``--max-num-queued-reqs N`` a request is admitted while the engine's unfinished requests, those admitted and on
    their way to it, and itself are N at most. Else it gets vLLM's ``QueueOverflowError``: status 503, vLLM's words and
    body, and ``Retry-After: 1`` unless it wants more than N. It is asked before anything is rendered, tokenised or
    decoded. A place is kept from the question until the engine counts the request. When the answer ends, fails or has
    lost its client, nothing of it counts any more, also where the engine still has the request: upstream forgets one
    whose answer was not read to its end only when Python collects the garbage. ``n`` answers, or a batch of n, take n
    places. What comes over a web socket is asked, and keeps no place on its way.
Why:
    vLLM-Omni takes the flag and prints its promise; ``AsyncOmni.check_admission`` is the empty method of its base
    class, and chat and speech do not call it. Where more arrives than a server bears, everybody's first audio then
    grows for as long as the load lasts. vLLM itself counts only after rendering, and lets a burst through (vllm issue
    #58192).
Why not a hook:
    The method could be overridden; nothing of ours lies between a request's body and its rendering.
Scope:
    Chat and speech, batches too, streamed or not; completions, responses, messages, transcriptions and whatever else
    asks as vLLM does. ``/v1/realtime``: an error event, and the connection is closed with 1013, when an utterance would
    begin (0.32: its requests count and are never refused). ``/v1/audio/speech/stream``: an error for the sentence,
    which may be one in the middle. Web sockets whose answers are chat's are asked as chat is. Images, videos and audio
    of diffusion models count and are never refused; duplex sessions do not count. Each of several API servers counts
    for itself: with M of them up to M times N. Nothing counts tokens: of ``--max-num-queued-tokens`` it warns. Without
    the flag it is ``not_applicable`` and asks nobody.
Fragility:
    Relies on a request being in the engine's books when it is submitted, without an await between, which the body of
    ``generate`` is fingerprinted for. Of the application's state ``api_server_count`` is read, which no class declares.
    A realtime connection's next text is a disconnect once it was closed.
Upstream thread:
    vllm-omni issue #5365 (a limit of concurrency), #2316 (503 beyond it); vllm issue #44933.
Remove when:
    ``AsyncOmni`` has a ``check_admission`` of its own, and chat and speech ask it.
"""

from __future__ import annotations

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Patch, Pin, Process, Reads, Row, State, Wrap

ENGINE = "vllm_omni.engine.async_omni_engine"
SERVING = "vllm_omni.entrypoints.openai"
API_SERVER, CHAT, BATCH, SPEECH, REALTIME = (
    f"{SERVING}.{name}"
    for name in ("api_server", "serving_chat", "batch_serving", "serving_speech", "realtime_connection")
)
CHATS = "vllm.entrypoints.openai.chat_completion.protocol"
ERRORS = "vllm.entrypoints.serve.engine.serving"
SOCKETS = "vllm.entrypoints.speech_to_text.realtime.connection"


def _fit(release: str, *realtime: AnySeam, note: str = "") -> Fit:
    """What a release needs, with what its realtime connections begin with."""
    seams: tuple[AnySeam, ...] = (
        Wrap("fastapi.applications", "FastAPI.__call__", wrapper="wrapped_app"),
        Wrap("vllm.engine.protocol", "EngineClient.check_admission", wrapper="wrapped_check_admission"),
        Wrap(ENGINE, "AsyncOmniEngine.add_request_async", wrapper="wrapped_add_request_async"),
        Pin("vllm_omni.entrypoints.async_omni", "AsyncOmni.generate"),
        Wrap(API_SERVER, "omni_init_app_state", wrapper="wrapped_init_app_state"),
        Wrap(CHAT, "OmniOpenAIServingChat.create_chat_completion", wrapper="wrapped_chat"),
        Wrap(BATCH, "OmniOpenAIServingChatBatch.create_batch_chat_completion", wrapper="wrapped_chat_batch"),
        Wrap(SPEECH, "OmniOpenAIServingSpeech.create_speech", wrapper="wrapped_speech"),
        Wrap(SPEECH, "OmniOpenAIServingSpeech.create_speech_batch", wrapper="wrapped_speech_batch"),
        Wrap(SPEECH, "OmniOpenAIServingSpeech._prepare_speech_generation", wrapper="wrapped_sentence"),
        Call(ERRORS, "BaseServing.create_error_response"),
        Reads("vllm.engine.arg_utils", "AsyncEngineArgs", ("max_num_queued_reqs", "max_num_queued_tokens")),
        Reads("vllm_omni.entrypoints.async_omni", "AsyncOmni", ("request_states",)),
        Reads(CHATS, "ChatCompletionRequest", ("n",)),
        Reads(CHATS, "BatchChatCompletionRequest", ("messages",)),
        Reads(f"{SERVING}.protocol.audio", "BatchSpeechRequest", ("items",)),
        *realtime,
    )
    return Fit(
        releases=(release,),
        preview="rc" in release,
        note=note,
        seams=seams,
        of_api_server=tuple(
            dict.fromkeys(seam.module for seam in seams if seam.module.startswith((SERVING, "vllm.entrypoints")))
        ),
        without_api_server="there is no API server: nobody is asked",
    )


PATCH = Patch(
    name="admission_limit",
    summary="upstream's --max-num-queued-reqs is held: a 503 at once when the server is full",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    upstream_option="--max-num-queued-reqs",
    counters=(
        Counter("admitted", "requests that got the places that they asked for"),
        Counter("refused", "requests that were told that the server is full"),
        Counter("most_at_once", "most places that were taken, of requests under way and on their way", is_maximum=True),
    ),
    rows=(
        Row(releases=("0.28.0",), state=State.NOT_APPLICABLE, note="vLLM 0.28 has no --max-num-queued-reqs"),
        _fit(
            "0.30.0",
            Wrap(REALTIME, "RealtimeConnection.start_generation", wrapper="wrapped_start_generation"),
            Call(SOCKETS, "RealtimeConnection.send_error"),
            Reads(SOCKETS, "RealtimeConnection", ("generation_task", "websocket")),
        ),
        _fit("0.32.0rc1", note="/v1/realtime is never refused"),
    ),
)
