"""What a command line of ``omni-fastpath ab`` asks for: its parts, variables, commands and their placeholders."""

from __future__ import annotations

import argparse
import re
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from omni_fastpath.config import refusal, shown, unknown

SEPARATOR = "--"
PORT, RESULT, URL, HOST = "port", "result", "url", "host"

_PLACEHOLDER = re.compile(r"(?<![${])\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A word in braces and nothing else: JSON has quotes there, a shell a ``$`` before it, and Jinja a second brace."""

_WHERE = {
    PORT: "{port} where the port stands, for example --port {port}, or {url}, which has it",
    RESULT: "{result} where the client writes its JSON, for example --save-result --result-filename {result}",
}

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_REACHED = (f"{{{HOST}}}", "127.0.0.1", "localhost", "0.0.0.0", "::", "")  # noqa: S104 - compared, not listened on
"""Where a server may listen that is asked at 127.0.0.1."""


def parts(arguments: Sequence[str], usage: str) -> list[list[str]]:
    """The arguments between bare ``--``: options, and two commands at most.

    Raises:
        ConfigError: There are more.
    """
    found: list[list[str]] = [[]]
    for argument in arguments:
        if argument == SEPARATOR and len(found) <= 2:
            found.append([])
        elif argument == SEPARATOR:
            raise refusal("command line", found="more than two bare `--`", allowed=usage)
        else:
            found[-1].append(argument)
    return found


def variables(option: str, assignments: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` each, the last of a name counts.

    Raises:
        ConfigError: One of another form.
    """
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise refusal(option, found=shown(name), allowed="NAME=VALUE, an environment variable of this arm")
        found[name] = value
    return found


def starts(count: int) -> int:
    """Starts an arm.

    Raises:
        ConfigError: An odd number, with which the arms would not come equally early and late, or none.
    """
    if count < 2 or count % 2:
        raise refusal("--starts", found=str(count), allowed="an even number from 2 on: starts come as A B B A")
    return count


def command(place: str, words: Sequence[str], needed: Iterable[str]) -> tuple[str, ...]:
    """A command with its placeholders, checked.

    Args:
        place: How a message names it.
        words: The command; no shell sees it.
        needed: Placeholders that must be in it.

    Raises:
        ConfigError: It is empty or cannot be found, lacks a placeholder, or has one that is not known.
    """
    if not words:
        raise refusal(place, found="nothing", allowed="a command")
    known = [f"{{{name}}}" for name in (PORT, HOST, URL, RESULT)]
    present = [match[0] for word in words for match in _PLACEHOLDER.finditer(word)]
    for placeholder in present:
        if placeholder not in known:
            raise unknown(place, placeholder, known, found=f"an unknown placeholder {placeholder}")
    for name in needed:
        if f"{{{name}}}" not in present and not (name == PORT and f"{{{URL}}}" in present):
            raise refusal(place, found=f"no {{{name}}}", allowed=_WHERE[name])
    if shutil.which(words[0]) is None:
        raise refusal(place, found=f"{words[0]!r}, which cannot be run", allowed="a program on PATH, or a path to one")
    return tuple(words)


def filled(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """A command with its placeholders filled in; other braces stay as they are."""
    return [_PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), word) for word in words]


def saves(bench: Sequence[str]) -> None:
    """Refuse upstream's client where it would measure and keep nothing.

    Raises:
        ConfigError: It is ``vllm bench serve`` without ``--save-result``.
    """
    upstreams = "bench" in bench and "serve" in bench
    if upstreams and not {"--save-result", "--append-result"} & set(bench):
        raise refusal("bench command", found="no --save-result", allowed="--save-result --result-filename {result}")


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option in a command, as ``--option VALUE`` or ``--option=VALUE``; the last one counts.

    As vLLM reads it: ``_`` in an option is ``-``.
    """
    found = None
    for word, following in zip(words, [*words[1:], None], strict=False):
        said, equals, value = word.partition("=")
        if said.replace("_", "-") == name and (equals or following is not None):
            found = value if equals else following
    return found


def setting(serve: Sequence[str], name: str) -> str | None:
    """The value of a server's option, from its command, else from the YAML file that vLLM's ``--config`` names.

    Only as an argument of its own: ``--config=FILE`` is not read by vLLM.
    """
    said = option(serve, name)
    if said is not None or "--config" not in serve[:-1]:
        return said
    file = Path(serve[serve.index("--config") + 1])
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None  # a pipe is vLLM's
    except (OSError, ValueError, yaml.YAMLError):
        return None  # vLLM says so when it reads it
    for key, value in content.items() if isinstance(content, dict) else ():
        if f"--{key}".replace("_", "-") == name and value is not None:
            return str(value)
    return None


def headers(bench: Sequence[str]) -> dict[str, str]:
    """What upstream's client sends besides, by ``--header KEY=VALUE KEY=VALUE``; the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--header", nargs="*", default=[])
    pairs = (word.partition("=") for word in parser.parse_known_args(list(bench))[0].header)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def reachable(serve: Sequence[str]) -> None:
    """Refuse a server that would be asked where it does not listen, until it counts as one that never was ready.

    Raises:
        ConfigError: It listens elsewhere than at ``http://127.0.0.1:PORT``.
    """
    allowed = f"a server at http://127.0.0.1:PORT: --host {{{HOST}}} or none, no TLS, no socket of its own"
    for name in ("--uds", "--ssl-certfile", "--ssl-keyfile"):
        if setting(serve, name) is not None:
            raise refusal("serve command", found=name, allowed=allowed)
    host = setting(serve, "--host")
    if host is not None and host not in _REACHED:
        raise refusal("serve command", found=f"--host {host}", allowed=allowed)


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def output_folder(path: Path) -> Path:
    """The folder for what is written, made.

    Raises:
        ConfigError: There are starts of an earlier series in it.
    """
    if any((path / "starts").glob("*.json")):
        raise refusal("--out", found=f"{path}, which has starts of an earlier series", allowed="a new or empty folder")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def positive(place: str, number: float) -> float:
    """A number above zero.

    Raises:
        ConfigError: It is not.
    """
    if not number > 0:
        raise refusal(place, found=f"{number:g}", allowed="a number above 0")
    return number
