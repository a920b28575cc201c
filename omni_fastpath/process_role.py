"""The kind of this process, from its name and its command line, and the names of the environment variables.

This module imports only the standard library, because it decides whether any other module of the package is imported.
``config`` describes the variables.
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
ON_UNLISTED = f"{NAMESPACE}_ON_UNLISTED"

HANDOFF = "_OMNI_FASTPATH_HANDOFF"
"""The variable that carries a parent's configuration to its stages (``startup``). Its name does not
begin with ``OMNI_FASTPATH``, because unknown names that do are refused."""

_BOOLEANS = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(("0", "false", "off", "no"), False)
BOOLEAN_WORDS = "1 true on yes or 0 false off no"

_PROC = Path("/proc")
"""Read directly, because psutil's creation times change when the machine's clock is set."""

_ENGINE = re.compile(r"StageEngineCoreProc_stage\d|EngineCore(_DP\d+)?$")
_WORKER = re.compile(r"StageDiffusionProc$|VllmWorker-\d+$|DiffusionWorker-\d+$")


class RefusedError(Exception):
    """Refuses a start: a setting is invalid, or a requested patch cannot serve under ``on_unsupported: fail``.

    The message names each setting, or each patch with the reason.
    """


def spawned_as() -> Literal["stage", "worker"] | None:
    """The kind of a process that vLLM or vLLM-Omni spawned, from its name. None for any other process.

    A ``stage`` runs a stage's scheduler. A ``worker`` is a stage's worker or a diffusion stage and has no scheduler.
    """
    if multiprocessing.parent_process() is None:
        return None
    name = multiprocessing.current_process().name
    if _ENGINE.match(name):
        return "stage"
    return "worker" if _WORKER.match(name) else None


def is_api_server(program: str) -> bool:
    """Whether this is the module of vLLM-Omni's API server, as ``python -m`` names it or as a file."""
    return program.replace("/", ".").removesuffix(".py").endswith("vllm_omni.entrypoints.openai.api_server")


def is_serve(command: Sequence[str]) -> bool:
    """Whether ``sys.argv`` is that of ``vllm serve --omni``, headless or not, or of vLLM-Omni's API server."""
    return (command[1:2] == ["serve"] and "--omni" in command) or is_api_server(command[0] if command else "")


def value(arguments: Sequence[str], option: str) -> str | None:
    """The value of an option, from ``--option VALUE`` or ``--option=VALUE``. The last one counts.

    As in vLLM, ``_`` in an option's name means ``-``.
    """
    found = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") == option and (equals or not following.startswith("-")):
            found = value if equals else following or None
    return found


def port(arguments: Sequence[str]) -> int | None:
    """The port in a server's arguments. None if there is none."""
    text = value(arguments, "--port") or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len("65535") else None


def boolean(text: str) -> bool | None:
    """The boolean that a word means, in any case. None for any other word."""
    return _BOOLEANS.get(text.strip().lower())


def master_off(environ: Mapping[str, str]) -> bool:
    """Whether ``OMNI_FASTPATH`` is one of ``0 false off no``. If so, no other setting is read or validated."""
    return boolean(environ.get(MASTER, "")) is False


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names begin with ``OMNI_FASTPATH``.

    A variable with an empty value counts as unset, because compose files and Helm charts create such variables.
    """
    return {name: text for name, text in environ.items() if name.startswith(NAMESPACE) and text.strip()}


# ---- Identity of a process: its id, its start time and its process namespace ----


def started(pid: int) -> int | None:
    """When the process with this id started, in clock ticks since boot. None if no such process runs."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def ancestors(pid: int) -> list[int]:
    """The ids of a process's parent, its parent's parent and so on."""
    found = []
    while (fields := stat(pid)) is not None and (pid := int(fields[1])) > 0:
        found.append(pid)
    return found


def namespace() -> int:
    """The number of this process's process namespace. 0 if the system has none.

    It distinguishes containers that share a folder, because each of them has a process 1.
    """
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def stat(task: int | str) -> list[str] | None:
    """The fields of a process or thread (``PID/task/ID``) in ``/proc``, from its state on (proc_pid_stat(5)).

    None if it does not exist.
    """
    try:
        with open(f"{_PROC}/{task}/stat", errors="replace") as file:  # noqa: PTH123 - faster, and called for every process
            text = file.read()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the program's name, which precedes it, may contain anything
