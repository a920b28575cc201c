"""An exception of ours: it is told once, and upstream works alone from then on."""

from __future__ import annotations

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

_runtime = runtime("lean_reader")


def step_aside(what: str, error: Exception) -> None:
    """Say it, and be out of upstream's way from here on; to be called where the exception is handled."""
    if not _runtime.has_failed:
        logger.exception("omni-fastpath: lean_reader: %s failed", what)
        _runtime.report(State.FAILED, f"{what} failed: {error!r}; upstream works alone from here on")
