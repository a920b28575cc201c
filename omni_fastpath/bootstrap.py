"""The door: how the package comes into a process, and whether anything of it is wanted there.

``register`` is the entry point of both plugin groups. Every vLLM process pays for it, most for nothing, so that only
the standard library stands here, and wrapt where a function of upstream's is wrapped (``gates``). What is asked for is
judged in ``admission`` and takes effect in ``activation``: they are imported where something may be asked for.

``register`` never raises: an exception from a plugin function would stop every vLLM process on the machine. A refusal
is raised where a server can be refused: when it reads its deploy YAML, and where it has none, or what reads it swallows
exceptions, at the gate before its stages are spawned.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from omni_fastpath import ownerror, spawned, variables

logger = logging.getLogger("vllm.omni_fastpath")

_registration = threading.Lock()
"""Taken by the first registration, and never given back."""


def register() -> None:
    """Arm this process; may be called many times, does its work once, and never raises."""
    if not _registration.acquire(blocking=False):
        return
    try:
        if spawned.is_stage_process():
            _register_stage()
        else:
            _register_server()
    except Exception:
        logger.exception("omni-fastpath: registration failed; this process runs as stock")


def _register_server() -> None:
    """A server, or any other process in which vLLM loads plugins: nobody knows yet."""
    # What an ancestor handed to its stages is not for a server that was started below it, nor for its engines.
    os.environ.pop(variables.HANDOFF, None)
    if variables.master_off(os.environ):
        if "--omni" in sys.argv[1:] and sys.argv[1] != "bench":
            _show_off()
        return
    from omni_fastpath.gates import GATE, Reader  # noqa: PLC0415 - wrapt

    Reader(judge).arm()
    if variables.anything_set(os.environ):
        try:
            from omni_fastpath.admission import ADMISSION  # noqa: PLC0415 - something may be asked for
        except Exception:
            GATE.before_stages = _before_stages  # an engine without a deploy YAML is refused there and nowhere else
            GATE.arm()
            raise
        ADMISSION.read_environment()


def _register_stage() -> None:
    if variables.master_off(os.environ):
        _show_off()
    elif variables.HANDOFF in os.environ:
        from omni_fastpath.activation import ACTIVATION  # noqa: PLC0415 - something was asked for

        ACTIVATION.take_over()


def _show_off() -> None:
    """``OMNI_FASTPATH=0``: touch nothing; only say so where somebody may ask a server or a stage what it is."""
    from omni_fastpath.activation import ACTIVATION  # noqa: PLC0415 - something was said

    ACTIVATION.show_off(f"{variables.MASTER}=0")


def _before_stages(source: str | None) -> None:
    """In the place of ``Admission``'s, where that cannot be imported: judge an engine that has no deploy YAML.

    Raises:
        RuntimeError: As ``judge``.
    """
    if source is None:
        judge(None, None)


def judge(source: str | None, deploy: Any) -> None:
    """``Admission.judge``, and the answer where not even that can be imported.

    Raises:
        ConfigError: As there.
        RefusedError: As there; a ``RuntimeError`` where it cannot be imported.
    """
    try:
        from omni_fastpath.admission import ADMISSION  # noqa: PLC0415 - a server reads its deploy YAML
    except Exception as error:  # a dependency of ours is broken: whatever it is, it is an error of ours
        refusal = ownerror.refusal(error, deploy, RuntimeError)
        if refusal is None:
            return
        from omni_fastpath.gates import GATE  # noqa: PLC0415 - wrapt

        GATE.close(source, refusal)
        raise refusal from error
    ADMISSION.judge(source, deploy)
