"""Requests of every kind that the endpoints take, as data; what upstream refuses is among them.

In a body "TEXT" is replaced by a prompt, "RECORDING" by a spoken one, "LENGTH" by a number of tokens and "MODEL" by the
model's name.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ab.capture import wav_file

CHAT, REALTIME = "/v1/chat/completions", "/v1/realtime"
SPEECH, SPOKEN = "/v1/audio/speech", "/v1/audio/speech/stream"
_STREAMED: Any = {"stream": True, "stream_options": {"include_usage": True}}
_RUNNING: Any = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Asked:
    """One request."""

    kind: str
    path: str
    body: Any
    """JSON; None is a GET, a list the messages of a websocket, bytes are sent as they are."""
    leaves: float | None = None
    """The client closes the connection after so many bytes, or if below one after so many seconds."""


Kinds = Mapping[str, Sequence[tuple[str, Any]]]
"""Bodies by kind, each with its path."""


def _chat(*modalities: str, **more: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": "TEXT"}], "modalities": list(modalities or ("text",))}
    return {**said, "temperature": 0.0, "max_tokens": "LENGTH", **more}


def _ways(body: Mapping[str, Any], *ways: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The chat whole, streamed, and in further ways."""
    return [(CHAT, {**body, **way}) for way in ({}, _STREAMED, *ways)]


def _first_stage(**params: Any) -> dict[str, Any]:
    """Parameters of the thinker, which upstream's chat takes so and by no other field, and defaults for the others."""
    return {"sampling_params_list": [{"temperature": 0.0, "max_tokens": "LENGTH", **params}]}


_SOUND: Any = {"type": "input_audio", "input_audio": {"data": "RECORDING", "format": "wav"}}
_HEARD: Any = [{"role": "user", "content": [_SOUND, {"type": "text", "text": "TEXT"}]}]
_TOOLS: Any = {"tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]}
_NAMED: Any = {"type": "function", "function": {"name": "look_up"}}
_REPORTED: Any = {"logprobs": True, "top_logprobs": 2}
_STOP: Any = {"stop": ["q", "zx"], "max_tokens": 120}
_ON: Any = {"ignore_eos": True, "max_tokens": 120}
_OPEN: Any = {"type": "session.update", "model": "MODEL"}
_APPEND: Any = {"type": "input_audio_buffer.append", "audio": "RECORDING"}
_COMMIT: Any = {"type": "input_audio_buffer.commit", "final": False}

BOTH: Kinds = {
    "chat, text and audio": [
        *_ways(_chat("text", "audio"), _RUNNING),
        *_ways(_chat("text", "audio", ignore_eos=True), _RUNNING),
        *_ways(_chat("text", "audio", min_tokens=50, max_tokens=90)),
    ]
}
AUDIO: Kinds = {"chat, audio": [*_ways(_chat("audio"), _RUNNING), *_ways(_chat("audio", ignore_eos=True))]}
"""Beside others upstream loses the end of some."""

OMNI: Kinds = {
    **BOTH,
    "chat, text": [*_ways(_chat(), _RUNNING), *_ways(_chat(ignore_eos=True))],
    "chat, sampled with a seed": _ways(_chat("text", "audio", temperature=0.8, seed="LENGTH")),
    "chat, recorded audio in": _ways(_chat("text", "audio", messages=_HEARD)),
    "chat, token ids and echo": _ways(_chat(return_token_ids=True, echo=True, return_prompt_text=True)),
    "log probabilities": [
        *_ways(_chat(**_REPORTED, **_first_stage(logprobs=2))),
        *_ways(_chat(logprobs=True, top_logprobs=0, **_first_stage(logprobs=0))),
        *_ways(_chat("text", "audio", logprobs=True, top_logprobs=5, **_first_stage(logprobs=5))),
        *_ways(_chat(return_tokens_as_token_ids=True, **_REPORTED, **_first_stage(logprobs=2))),
        (CHAT, _chat(**_first_stage(prompt_logprobs=1))),
    ],
    "tools": [
        *_ways(_chat(**_TOOLS)),
        *_ways(_chat("text", "audio", tool_choice="auto", **_TOOLS)),
        *(way for choice in ("none", "required", _NAMED) for way in _ways(_chat(tool_choice=choice, **_TOOLS))),
    ],
    "stop tokens": _ways(_chat("text", "audio", stop_token_ids=[80])),
    "n > 1": _ways(_chat(n=2)) + _ways(_chat("text", "audio", n=3)),
    "chat, a batch": [
        ("/v1/chat/completions/batch", {**_chat(*each), "messages": [[{"role": "user", "content": "TEXT"}]] * 3})
        for each in ((), ("text", "audio"))
    ],
    "realtime socket": [
        (REALTIME, [_OPEN, {"type": "TEXT"}]),
        (REALTIME, [_COMMIT]),
        (REALTIME, ["no JSON"]),
        (REALTIME, [_OPEN, _APPEND, _COMMIT, {**_COMMIT, "final": True}]),
    ],
    "tokens and lists": [
        ("/tokenize", {"prompt": "TEXT"}),
        ("/tokenize", {"messages": _chat()["messages"]}),
        ("/detokenize", {"tokens": [71, 72, 220, 80]}),
        *((path, None) for path in ("/v1/models", "/v1/audio/voices", "/health", "/version")),
    ],
    "bad requests": [
        (CHAT, _chat(model="no-such-model")),
        *(*_ways(_chat("smell")), *_ways(_chat(max_tokens=-5)), *_ways(_chat(temperature="warm"))),
        *(*_ways(_chat(stop=["a"] * 7)), *_ways(_chat(stop_token_ids=["a"])), *_ways(_chat(top_logprobs=3))),
        *_ways(_chat(logprobs=True, top_logprobs=500, **_first_stage(logprobs=500))),
        *_ways(_chat(messages=[{"role": "user", "content": "TEXT" * 900}])),
        *(*_ways(_chat(messages=[])), *_ways(_chat(sampling_params_list=[{"no_such": 1}]))),
        *((CHAT, body) for body in ({"messages": "not a list"}, b"{", None)),
        ("/v1/no/such/path", {}),
        ("/v1/responses", {"input": 5}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/v1/completions", {"prompt": "TEXT", "max_tokens": "LENGTH"}),
        ("/v1/completions", {"prompt": "TEXT", "stream": True, "logprobs": 2}),
        (SPEECH, {"input": "TEXT"}),
        ("/v1/audio/transcriptions", {}),
        ("/v1/audio/generate", {"input": "TEXT"}),
    ],
}

ALONE: Kinds = {
    "responses": [
        ("/v1/responses", {"input": "TEXT", "max_output_tokens": "LENGTH", "temperature": 0, "stream": stream, **more})
        for stream in (False, True)
        for more in ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2})
    ],
    "messages": [
        ("/v1/messages", {"model": "MODEL", "messages": _chat()["messages"], "max_tokens": "LENGTH", "stream": stream})
        for stream in (False, True)
    ],
}
"""Upstream answers these with the output that came last, text or audio: on an idle server mostly the audio."""

STOPPED: Kinds = {
    "stop strings": [*_ways(_chat(**_STOP)), *_ways(_chat(include_stop_str_in_output=True, **_STOP))],
    "log probabilities, not handed on by upstream: an error": _ways(_chat(**_REPORTED)),
}
"""The front end ends these, and the stage goes on until it hears of it: so its tokens are counted by chance."""

LEFT: Kinds = {
    "chat, the client leaves": [
        *(*_ways(_chat(**_ON)), *_ways(_chat("text", "audio", **_ON))),
        (CHAT, _chat("audio", **_ON, **_STREAMED)),
    ]
}

_VIVIAN: Any = {"input": "TEXT", "voice": "vivian"}
_SPEAKS: Any = {"type": "session.config", "voice": "vivian"}
_TALK: Any = [{"type": "input.text", "text": "TEXT. TEXT"}, {"type": "input.done"}]
_BYE: Any = {"type": "session.close"}
_WRONG: Any = (
    *({"input": each} for each in ("", 5)),
    *({"speed": each} for each in (9, 1.5)),
    *({"task_type": each} for each in ("VoiceDesign", "Base")),
    *({"response_format": each, "stream": True} for each in ("aac", "mp3")),
    *({"voice": "nobody"}, {"language": "Klingon"}, {"sample_rate": 16000}, {"max_new_tokens": 0}),
    *({"model": "no-such-model"}, {"word_timestamps": True, "stream": True}),
)

STREAMED_SPEECHES: Kinds = {
    "speech, streamed": [
        (SPEECH, {**_VIVIAN, "stream": True, "stream_format": how, "response_format": form, **more})
        for how in ("sse", "audio")
        for form in ("pcm", "wav")
        for more in ({}, {"max_new_tokens": 30, "seed": "LENGTH", "initial_codec_chunk_frames": 3})
    ]
}
SPEECHES: Kinds = {
    **STREAMED_SPEECHES,
    "speech, whole": [
        *((SPEECH, {**_VIVIAN, "response_format": form}) for form in ("wav", "pcm", "flac", "mp3", "opus")),
        (SPEECH, {**_VIVIAN, "instructions": "slowly", "language": "English"}),
        (SPEECH, {**_VIVIAN, "max_new_tokens": 20, "seed": "LENGTH"}),
        (SPEECH, {**_VIVIAN, "voice": "ryan", "sample_rate": 24000}),
    ],
    "speech, a batch": [
        (f"{SPEECH}/batch", {"items": [{"input": "TEXT"}, {"input": "a TEXT", "voice": "ryan"}], "voice": "vivian"}),
        (f"{SPEECH}/batch", {"items": [{"input": "TEXT"}, {"input": ""}], "response_format": "pcm"}),
    ],
    "speech, over a socket": [
        (SPOKEN, [{**_SPEAKS, "response_format": "pcm", "stream_audio": True}, *_TALK, *_TALK, _BYE]),
        (SPOKEN, [{**_SPEAKS, "split_granularity": "sentence"}, *_TALK, _BYE]),
        (SPOKEN, [*_TALK]),
        (SPOKEN, [{**_SPEAKS, "voice": "nobody"}, *_TALK, _BYE]),
        (SPOKEN, ["no JSON"]),
    ],
    "chat, audio": _ways(_chat("audio")),
    "completions, responses": [
        ("/v1/completions", {"prompt": "TEXT", "max_tokens": "LENGTH"}),
        ("/v1/responses", {"input": "TEXT", "max_output_tokens": "LENGTH"}),
    ],
    "tokens and lists": [("/v1/audio/voices", None), ("/v1/models", None), ("/health", None)],
    "bad requests": [
        *((SPEECH, {**_VIVIAN, **wrong}) for wrong in _WRONG),
        (SPEECH, b"{"),
        (f"{SPEECH}/batch", {"items": []}),
        *_ways(_chat("text")),
        ("/v1/audio/generate", {"input": "TEXT"}),
    ],
}
LEFT_SPEECHES: Kinds = {
    "speech, the client leaves": [(SPEECH, {**_VIVIAN, "response_format": "pcm", "stream": on}) for on in (False, True)]
}

_AFTER = (900, 60_000, 0.05, 5_000, 0.2, 1)
"""When clients leave, in turn from round to round, as `Asked.leaves` has it."""
_RARE = ("bad requests", "tokens and lists")
"""Kinds that are asked in one round of three."""


def asked(kinds: Kinds, count: int, model: str, seed: int = 0) -> list[Asked]:
    """So many requests, the same whenever they are asked for: rounds of every body, in an order drawn for each.

    Each has words of its own: a recording that another replica has had already is a 500 in upstream ("cache drift").

    Args:
        kinds: What is asked.
        count: Of requests.
        model: The model's name.
        seed: Other ones have other words.
    """
    chance = random.Random(seed)
    rows = [(kind, path, body) for kind, bodies in kinds.items() for path, body in bodies]
    often = [row for row in rows if row[0] not in _RARE]
    found: list[Asked] = []
    rounds = itertools.count()
    while len(found) < count:
        number = next(rounds)
        this = often if number % 3 else rows
        for kind, path, body in chance.sample(this, k=len(this)):
            words = "".join(chance.choices(string.ascii_lowercase + " ", k=chance.randint(5, 80)))
            filled = _filled(body, f"say {words}", chance.randint(5, 120), model)
            leaves = _AFTER[number % len(_AFTER)] if kind.endswith("leaves") else None
            found.append(Asked(kind, path, filled, leaves))
    return found[:count]


def _filled(body: Any, text: str, length: int, model: str) -> Any:
    if body is None or isinstance(body, bytes):
        return body
    written = json.dumps(body).replace("TEXT", text).replace('"LENGTH"', str(length))
    recording = wav_file(text.encode().ljust(16000, b"\0"), 16000)  # half a second, another one for other words
    return json.loads(written.replace("MODEL", model).replace("RECORDING", recording))
