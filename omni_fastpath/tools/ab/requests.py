"""The fixed requests by which the answers of two arms are compared: with a fixed seed, one after another.

Chat is greedy besides; a speech request has no temperature, and samples as its model's deploy YAML says. They go where
the benchmark client's go, with the same extra body, so that a model that only speaks is asked to speak.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omni_fastpath.tools.ab.capture import Request, chat_request, speech_request
from omni_fastpath.tools.ab.commands import option

COUNT = 8
MAX_TOKENS = 64
SEED = 0

_CHAT, _SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_ENDPOINT_OF: Mapping[str, str] = {
    "openai-chat": _CHAT,
    "openai-chat-omni": _CHAT,
    "openai-audio-speech": _SPEECH,
}
"""Where upstream's backends send, unless ``--endpoint`` says otherwise."""

_SENTENCES = (
    "Describe the way from a lake to the sea.",
    "What is a bridge made of, and who builds it?",
    "Count from one to twelve, slowly.",
    "Tell me about the weather in the mountains.",
    "How do you make bread from flour, water and salt?",
    "Name five animals that live in a forest.",
    "Why is the evening sky red?",
    "Explain how a sailing boat goes against the wind.",
)


_OURS = ("stream", "prompt", "text", "abort_after")
"""What the functions that make requests take under these names is no field of a body."""


def digest(requests: Sequence[Request]) -> str:
    """By which starts that were asked different things are told apart, whatever their servers call the model."""
    said = [
        (each.path, {key: value for key, value in each.body.items() if key != "model"}, each.abort_after)
        for each in requests
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def fixed(bench: Sequence[str], count: int) -> tuple[list[Request], str]:
    """So many requests of the kind that the client sends, and in words why there are none.

    Args:
        bench: The client's command.
        count: How many.
    """
    endpoint = option(bench, "--endpoint") or _ENDPOINT_OF.get(option(bench, "--backend") or "")
    body, why = _extra_body(bench)
    model = body.pop("model", None) or option(bench, "--served-model-name") or option(bench, "--model")
    if count == 0:
        return [], "no requests were asked for"
    if why:
        return [], why
    prompts = [
        f"{_SENTENCES[place % len(_SENTENCES)]}{' Again.' * (place // len(_SENTENCES))}" for place in range(count)
    ]
    if endpoint == _CHAT:
        given = {"modalities": ("text", "audio"), "max_tokens": MAX_TOKENS, "seed": SEED, **body}
        return [chat_request(prompt, model=model, **given) for prompt in prompts], ""
    if endpoint == _SPEECH:
        return [speech_request(prompt, model=model, **{"seed": SEED, **body}) for prompt in prompts], ""
    return [], f"there are no fixed requests for {endpoint or 'this client'}"


def _extra_body(bench: Sequence[str]) -> tuple[dict[str, Any], str]:
    text = option(bench, "--extra-body")
    if text is None:
        return {}, ""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    # What chat_request and speech_request say themselves is not the client's to say.
    kept = {key: value for key, value in body.items() if key not in _OURS} if isinstance(body, dict) else {}
    return kept, "" if isinstance(body, dict) else "the client's --extra-body is no JSON object"
