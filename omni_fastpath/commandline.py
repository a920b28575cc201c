"""What the command line of ``vllm serve --omni`` says, as vLLM's own parser reads it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_HEADLESS = "--headless"
_SHORTEST = "--hea"
"""argparse takes any beginning that no other option has; ``--he`` could be ``--help``."""


def is_serve(arguments: Sequence[str]) -> bool:
    """Whether these arguments, without the program, are those of ``vllm serve --omni``, with a front end or without."""
    return arguments[:1] == ["serve"] and "--omni" in arguments


def is_headless(arguments: Sequence[str]) -> bool:
    """Whether these arguments, without the program, are those of a headless server.

    As a flag, or as a key of the file that ``--config`` names (``FlexibleArgumentParser._pull_args_from_config`` in
    ``vllm/utils/argparse_utils.py``: only as an argument of its own, ``--config=FILE`` is not read by vLLM). Only with
    ``--omni``: another program's ``--headless`` is its own.
    """
    return _is_headless(tuple(arguments))


@functools.lru_cache
def _is_headless(arguments: tuple[str, ...]) -> bool:
    if "--omni" not in arguments:
        return False
    flags = [argument for argument in arguments if argument.startswith(_SHORTEST)]
    if "--config" in arguments[:-1]:
        flags += _flags_in(arguments[arguments.index("--config") + 1])
    return any(_HEADLESS.startswith(flag) and flag.startswith(_SHORTEST) for flag in flags)


def _flags_in(file: str) -> Iterator[str]:
    """The options that vLLM makes of a file; a key that is false or an empty list gives none."""
    if not Path(file).is_file():
        return  # a pipe can be read only once, and that is for vLLM
    try:
        with Path(file).open(encoding="utf-8") as config:
            content: Any = yaml.safe_load(config)
    except (OSError, ValueError, yaml.YAMLError):
        return  # vLLM says so when it reads it
    for key, value in content.items() if isinstance(content, dict) else ():
        if value is not False and value != []:
            yield f"--{key}"


def value(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option, as ``--option VALUE`` or ``--option=VALUE``; the last one counts."""
    found = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == option and not following.startswith("-"):
            found = following or None
        elif argument.startswith(f"{option}="):
            found = argument.removeprefix(f"{option}=")
    return found


def port(arguments: Sequence[str]) -> int | None:
    """The port that a server's arguments name; None where they do not."""
    text = value(arguments, "--port") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len("65535") else None
