"""The fixed requests by which the answers of two arms are compared: with a fixed seed, one after another.

Chat is greedy besides; a speech request has no temperature, and samples as its model's deploy YAML says. They go where
the benchmark client's go, with the same extra body, so that a model that only speaks is asked to speak.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from omni_fastpath.config import refusal
from omni_fastpath.tools.ab.capture import Request, chat_request, speech_request
from omni_fastpath.tools.ab.commands import option

MAX_TOKENS = 64
SEED = 0

_CHAT, _SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_ENDPOINT_OF = {"openai-chat": _CHAT, "openai-chat-omni": _CHAT, "openai-audio-speech": _SPEECH}
"""Where upstream's backends send, unless ``--endpoint`` says otherwise."""
_MADE: Mapping[str | None, Callable[[str], Request]] = {
    _CHAT: lambda prompt: chat_request(prompt, max_tokens=MAX_TOKENS, seed=SEED),
    _SPEECH: lambda prompt: speech_request(prompt, seed=SEED),
}

PROMPTS = [f"Explain in {count} sentences how bread is made." for count in range(1, 9)]


def digest(requests: Sequence[Request]) -> str:
    """By which starts that were asked different things are told apart, whatever their servers call the model."""
    said = [(each.path, {**each.body, "model": None}) for each in requests]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def fixed(bench: Sequence[str]) -> list[Request]:
    """The requests, of the kind that the client's command sends; none where that is neither chat nor speech.

    Raises:
        ConfigError: The client's extra body is no JSON object.
    """
    make = _MADE.get(option(bench, "--endpoint") or _ENDPOINT_OF.get(option(bench, "--backend") or ""))
    if make is None:
        return []
    extra = option(bench, "--extra-body") or "{}"
    try:
        body = dict(json.loads(extra))
    except (TypeError, ValueError):
        raise refusal("bench command", found="--extra-body that cannot be read", allowed="a JSON object") from None
    model = option(bench, "--served-model-name") or option(bench, "--model")
    own = {**({"model": model} if model else {}), **body, "stream": True}
    return [replace(request, body={**request.body, **own}) for request in map(make, PROMPTS)]
