"""What a command line of ``omni-fastpath ab`` asks for: its parts, variables, commands and their placeholders."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterable, Sequence

from omni_fastpath.config import refusal, shown

PORT, RESULT = "{port}", "{result}"
"""Placeholders: a port for each server, and a path for the JSON that the client writes."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_REACHED = (None, "127.0.0.1", "localhost", "0.0.0.0", "::", "")  # noqa: S104 - compared, not listened on
"""Values of ``--host`` of a server that is reached at 127.0.0.1."""
_UNREAD = ("--uds", "--ssl-certfile", "--ssl-keyfile", "--config")
"""Options of a server that is not reached there, or whose own options are elsewhere."""


def parts(arguments: Sequence[str], usage: str) -> list[list[str]]:
    """The arguments between bare ``--``: options, and two commands at most.

    Raises:
        ConfigError: There are more.
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


def check(place: str, words: Sequence[str], needed: Iterable[str]) -> None:
    """Refuse a command that cannot be run, or lacks a placeholder.

    Args:
        place: How a message names it.
        words: The command; no shell sees it.
        needed: Placeholders that must be in it.

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
    """A command with its placeholders filled in; other braces stay as they are."""
    return [word.replace(PORT, str(port)).replace(RESULT, str(result)) for word in words]


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


def headers(bench: Sequence[str]) -> dict[str, str]:
    """What upstream's client sends besides, by ``--header KEY=VALUE KEY=VALUE``; the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--header", nargs="*", default=[])
    pairs = (word.partition("=") for word in parser.parse_known_args(list(bench))[0].header)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def check_reachable(serve: Sequence[str]) -> None:
    """Refuse a server that would be asked where it does not listen, until it counts as one that never was ready.

    Raises:
        ConfigError: It listens elsewhere than at ``http://127.0.0.1:PORT``, or its options are in a file.
    """
    found = [name for name in _UNREAD if option(serve, name) is not None]
    host = option(serve, "--host")
    if host not in _REACHED:
        found.append(f"--host {host}")
    if found:
        allowed = "a server at http://127.0.0.1:PORT without TLS, its options in the command"
        raise refusal("serve command", found=", ".join(found), allowed=allowed)
