"""The parent's resolved configuration on its way to the stages that it spawns.

Stages are spawned and inherit the environment, so the result travels in a variable. It names the parent, and a process
takes it only from an ancestor that lives: a variable left in a shell or a job's environment means nothing.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_fastpath.config import Resolved
from omni_fastpath.declare import Patch
from omni_fastpath.processid import ancestors, started
from omni_fastpath.variables import HANDOFF

VARIABLE = HANDOFF

SCHEMA = 1

logger = logging.getLogger("vllm.omni_fastpath")


class _Handoff(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: Literal[1] = Field(alias="schema")
    pid: int
    started: int
    resolved: str


def export(resolved: Resolved, environ: MutableMapping[str, str] = os.environ) -> None:
    """Put the result into the environment that this process's children inherit.

    Raises:
        RuntimeError: This process cannot see itself in the process table, so that no child could check it.
    """
    began = started(os.getpid())
    if began is None:
        raise RuntimeError(f"process {os.getpid()} cannot see itself in the process table")
    environ[VARIABLE] = json.dumps(
        {"schema": SCHEMA, "pid": os.getpid(), "started": began, "resolved": resolved.to_json()}
    )


def receive(patches: Sequence[Patch], environ: Mapping[str, str] = os.environ) -> Resolved | None:
    """What an ancestor of this process handed over; None without one.

    A stale or foreign variable is ignored: it is nobody's configuration. So is this process's own.

    Raises:
        ConfigError: An ancestor that lives handed over what cannot be read here: this package was exchanged under it.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return None
    try:
        handoff = _Handoff.model_validate_json(text)
    except ValidationError as error:
        logger.debug("omni-fastpath: %s cannot be read: %s", VARIABLE, error)
        return None
    if handoff.pid not in ancestors(os.getpid()) or started(handoff.pid) != handoff.started:
        logger.debug("omni-fastpath: %s is from process %d, no ancestor of this one", VARIABLE, handoff.pid)
        return None
    return Resolved.from_json(handoff.resolved, patches)
