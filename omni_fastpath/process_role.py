"""What kind of process this is, by its name and its command line, and the names of our variables, by which it is off.

The standard library alone: here is decided whether anything else of ours is imported. ``config`` is the page about all
variables.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

NAMESPACE = "OMNI_FASTPATH"
MASTER = NAMESPACE
ON_UNSUPPORTED = f"{NAMESPACE}_ON_UNSUPPORTED"
ON_UNLISTED = f"{NAMESPACE}_ON_UNLISTED"

HANDOFF = "_OMNI_FASTPATH_HANDOFF"
"""The variable that carries a parent's configuration to its stages (``startup``); outside the ``OMNI_FASTPATH``
namespace, in which it would be an unknown name."""

TRUE_WORDS = ("1", "true", "on", "yes")
FALSE_WORDS = ("0", "false", "off", "no")
BOOLEAN_WORDS = f"{' '.join(TRUE_WORDS)} or {' '.join(FALSE_WORDS)}"

_PROC = Path("/proc")
"""Read as it stands: psutil's times of creation move with the machine's clock."""

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
    """The value of an option, as ``--option VALUE`` or ``--option=VALUE``; the last one counts.

    As vLLM reads it: ``_`` in an option is ``-``.
    """
    found = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option and (equals or not following.startswith("-")):
            found = value if equals else following or None
    return found


def port(arguments: Sequence[str]) -> int | None:
    """The port that a server's arguments name; None where they do not."""
    text = value(arguments, "--port") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len("65535") else None


def boolean(text: str) -> bool | None:
    """The boolean that a word stands for, whatever its case; None when it is none of the words."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    return None


def master_off(environ: Mapping[str, str]) -> bool:
    """Whether ``OMNI_FASTPATH`` is one of ``0 false off no``: then nothing else is looked at, not even validated."""
    return boolean(environ.get(MASTER, "")) is False


def ours(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with a name of our namespace. An empty one is not set: compose files and Helm charts make them."""
    return {name: text for name, text in environ.items() if name.startswith(NAMESPACE) and text.strip()}


# ---- Which process: told apart from a later one with the same id, and from one of another process namespace ----


def started(pid: int) -> int | None:
    """When the process with this id began, in clock ticks since boot; None when none runs."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def ancestors(pid: int) -> list[int]:
    """The ids of a process's parent, its parent's parent and so on, as they are now."""
    found = []
    while (fields := stat(pid)) is not None and (pid := int(fields[1])) > 0:
        found.append(pid)
    return found


def namespace() -> int:
    """The number of this process's process namespace; 0 where there is none.

    Two containers that share a folder both have a process 1.
    """
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def stat(task: int | str) -> list[str] | None:
    """What the kernel says of a process or a thread (``PID/task/ID``), from its state on (proc_pid_stat(5)).

    None when it shows none.
    """
    try:
        with open(f"{_PROC}/{task}/stat", errors="replace") as file:  # noqa: PTH123 - of every process, often
            text = file.read()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the program's name before it may hold anything
