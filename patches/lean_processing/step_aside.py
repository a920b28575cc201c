"""What happens on an exception of ours: it is logged once, and upstream works alone from then on."""

from __future__ import annotations

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime

patch = runtime("lean_processing")


def step_aside(what: str, error: Exception) -> None:
    """Report the patch as failed; to be called where the exception is handled.

    Args:
        what: What failed, as the subject of a sentence.
        error: The exception.
    """
    if not patch.has_failed:
        logger.exception("omni-fastpath: lean_processing: %s failed", what)
        patch.report(State.FAILED, f"{what} failed: {error!r}; upstream works alone from here on")
