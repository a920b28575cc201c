"""The command line of ``omni-fastpath ab``, and the fixed requests whose answers are compared.

The fixed requests are sent one after another, with a fixed seed. Chat requests are greedy. Speech requests have no
temperature and sample as the deploy YAML says. They use the endpoint and the extra body of the benchmark client, so
that a model that only speaks gets speech requests. One chat request contains audio.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from omni_fastpath.config import refusal, short_repr
from omni_fastpath.process_role import value
from omni_fastpath.tools.ab.capture import Request, chat_request, speech_request, wav_file, with_audio

PORT, RESULT = "{port}", "{result}"
"""Placeholders for the port of a server, and for the path of the client's JSON."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_ARM = re.compile(r"([a-z][A-Za-z0-9.-]*)=([A-Z][A-Z0-9_]*=.*)", re.DOTALL)
"""An arm's name before a variable. The name is in lower case, so that ``DEBUG=A=1`` is a variable."""

_REACHED = (None, "127.0.0.1", "localhost", "0.0.0.0", "::", "")  # noqa: S104 - compared, not listened on
"""Values of ``--host`` with which a server answers at 127.0.0.1."""
_UNREAD = ("--uds", "--ssl-certfile", "--ssl-keyfile", "--config")
"""Options of a server that does not answer there, or whose options are in a file."""


MAX_TOKENS = 64
SEED = 0

_CHAT, _SPEECH = "/v1/chat/completions", "/v1/audio/speech"
_ENDPOINT_OF = {"openai-chat": _CHAT, "openai-chat-omni": _CHAT, "openai-audio-speech": _SPEECH}
"""The default endpoints of upstream's backends."""
_MADE: Mapping[str | None, Callable[[str], Request]] = {
    _CHAT: lambda prompt: chat_request(prompt, max_tokens=MAX_TOKENS, seed=SEED),
    _SPEECH: lambda prompt: speech_request(prompt, seed=SEED),
}

SATURATION = "This measures saturation, because --request-rate is inf, the client's default. Set your busy hour's rate."
ENOUGH = 100
"""Requests from which on the 99th percentile is not just the slowest one."""

PROMPTS = [f"Explain in {count} sentences how bread is made." for count in range(1, 9)]
_RECORDED_S, _RECORDED_HZ = 5, 16_000


def parts(arguments: Sequence[str], usage: str) -> list[list[str]]:
    """The arguments between bare ``--``: options, and at most two commands.

    Raises:
        ConfigError: There are more than two commands.
    """
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--":
            found.append([])
        else:
            found[-1].append(argument)
    if len(found) > 3:
        raise refusal("command line", found="more than two bare `--`", allowed=usage)
    return found


def arm(name: str, option: str, assignments: Iterable[str]) -> tuple[str, dict[str, str]]:
    """An arm's name and variables, from ``NAME=VALUE`` or ``ARM=NAME=VALUE``. The last value of a variable counts.

    Args:
        name: The default name.
        option: The option, for messages.
        assignments: Its values.

    Raises:
        ConfigError: A value has another form.
    """
    found = {}
    for assignment in assignments:
        match = _OF_ARM.fullmatch(assignment)
        name, setting = match.groups() if match else (name, assignment)
        variable, equals, value = setting.partition("=")
        if not equals or not _VARIABLE.fullmatch(variable):
            raise refusal(option, found=short_repr(variable), allowed="NAME=VALUE, an environment variable of this arm")
        found[variable] = value
    return name, found


def check(place: str, words: Sequence[str], needed: Iterable[str]) -> None:
    """Refuse a command that cannot be run or lacks a placeholder.

    Args:
        place: The name of the command, for messages.
        words: The command.
        needed: Its placeholders.

    Raises:
        ConfigError: It is such a command.
    """
    if not words or shutil.which(words[0]) is None:
        found = f"{words[0]!r}, which cannot be run" if words else "nothing"
        raise refusal(place, found=found, allowed="a program on PATH, or a path to one")
    for placeholder in needed:
        if not any(placeholder in word for word in words):
            allowed = f"--port {PORT}, --result-filename {RESULT} or the like"
            raise refusal(place, found=f"no {placeholder}", allowed=allowed)


def filled(words: Sequence[str], port: int, result: object) -> list[str]:
    """A command with its placeholders replaced. Other braces are not changed."""
    return [word.replace(PORT, str(port)).replace(RESULT, str(result)) for word in words]


def headers(bench: Sequence[str]) -> dict[str, str]:
    """The headers of upstream's client, from ``--header KEY=VALUE KEY=VALUE``. The last option counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--header", nargs="*", default=[])
    pairs = (word.partition("=") for word in parser.parse_known_args(list(bench))[0].header)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def load_s(bench: Sequence[str]) -> float | None:
    """Seconds that upstream's client needs to send its requests at its rate. 0 if the rate is infinite, its default.

    None for another client, for a closed loop, and if it cannot be determined.
    """
    try:
        per_s = float(value(bench, "--request-rate") or ("inf" if "bench" in bench else ""))
        is_closed = math.isinf(per_s) and value(bench, "--max-concurrency") is not None
        return None if is_closed else _requests(bench) / per_s
    except (ValueError, ArithmeticError):  # the client will report it
        return None


def _requests(bench: Sequence[str]) -> int:
    return int(value(bench, "--num-prompts") or "1000")


def warnings(bench: Sequence[str]) -> list[str]:
    """Warnings about a load, before the first start and in the report."""
    found = [SATURATION] if load_s(bench) == 0 else []
    with contextlib.suppress(ValueError):
        if (few := _requests(bench)) < ENOUGH:
            found.append(f"With {few} requests p99 is the slowest one. Send at least {ENOUGH} (--num-prompts).")
    return found


def check_reachable(serve: Sequence[str]) -> None:
    """Refuse a server that does not answer at ``http://127.0.0.1:PORT``, because it would never seem to be ready.

    Raises:
        ConfigError: It listens elsewhere, or its options are in a file.
    """
    found = [name for name in _UNREAD if value(serve, name) is not None]
    host = value(serve, "--host")
    if host not in _REACHED:
        found.append(f"--host {host}")
    if found:
        allowed = "a server at http://127.0.0.1:PORT without TLS, its options in the command"
        raise refusal("serve command", found=", ".join(found), allowed=allowed)


def digest(requests: Sequence[Request]) -> str:
    """A hash of the requests without the model's name. Starts with different requests have different ones."""
    kept = [(each.path, {**each.body, "model": None}) for each in requests]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def fixed(bench: Sequence[str]) -> list[Request]:
    """The fixed requests, of the client's kind. None if that is neither chat nor speech.

    Raises:
        ConfigError: The client's extra body is not a JSON object.
    """
    make = _MADE.get(value(bench, "--endpoint") or _ENDPOINT_OF.get(value(bench, "--backend") or ""))
    if make is None:
        return []
    extra = value(bench, "--extra-body") or "{}"
    try:
        body = dict(json.loads(extra))
    except (TypeError, ValueError, RecursionError):
        raise refusal("bench command", found="--extra-body that cannot be read", allowed="a JSON object") from None
    model = value(bench, "--served-model-name") or value(bench, "--model")
    own = {**({"model": model} if model else {}), **body, "stream": True}
    made = [*map(make, PROMPTS), *([_recording()] if make is _MADE[_CHAT] else [])]
    return [replace(request, body={**request.body, **own}) for request in made]


def _recording() -> Request:
    """A chat request with audio, random 16-bit samples. A model without audio input refuses it in both arms."""
    hiss = random.Random(SEED).randbytes(2 * _RECORDED_S * _RECORDED_HZ)  # noqa: S311 - no secret
    return with_audio(_MADE[_CHAT](PROMPTS[0]), wav_file(hiss, _RECORDED_HZ), "wav")
