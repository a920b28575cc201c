"""What kind of process this is, by its name and its command line; the standard library alone."""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections.abc import Sequence
from typing import Literal

_ENGINE = re.compile(r"StageEngineCoreProc_stage\d|EngineCore(_DP\d+)?$")
_WORKER = re.compile(r"StageDiffusionProc$|VllmWorker-\d+$|DiffusionWorker-\d+$")


def spawned_as() -> Literal["stage", "worker"] | None:
    """What this process was spawned for, by the names that vLLM and vLLM-Omni give; None for any other process.

    A ``stage`` runs a stage's scheduler. A ``worker`` of a stage, or a diffusion stage, has no scheduler.
    """
    if multiprocessing.parent_process() is None:
        return None
    name = multiprocessing.current_process().name
    if _ENGINE.match(name):
        return "stage"
    return "worker" if _WORKER.match(name) else None


def is_serve(arguments: Sequence[str]) -> bool:
    """Whether these arguments, without the program, are those of ``vllm serve --omni``, with a front end or without."""
    return arguments[:1] == ["serve"] and "--omni" in arguments


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
