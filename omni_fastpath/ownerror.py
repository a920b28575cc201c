"""The answer to an error of ours before the configuration is known: what can be read of it plainly decides.

The standard library alone, because the error may be that nothing else can be imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from omni_fastpath import variables

logger = logging.getLogger("vllm.omni_fastpath")


def refusal(
    error: Exception, deploy: Any, refused: type[Exception], show: Callable[[str], None] | None = None
) -> Exception | None:
    """Say what went wrong; what refuses the server, or None where it goes on without us.

    Args:
        error: Ours.
        deploy: What upstream made of the deploy YAML; None without one.
        refused: What a refusal is raised as.
        show: Given the reason, makes the patches ``failed``; not called where nobody asked for anything.
    """
    block = deploy.get("fastpath") if isinstance(deploy, Mapping) else None
    if not variables.anything_set(os.environ) and not block:
        logger.warning("omni-fastpath: looking for what is asked for failed, and nobody asked for anything: %r", error)
        return None
    logger.error("omni-fastpath: the configuration cannot take effect: %r", error, exc_info=error)
    if show is not None:
        show(f"an error of omni-fastpath: {error!r}")
    word = os.environ.get(variables.ON_UNSUPPORTED)
    if word is None and isinstance(block, Mapping):
        word = str(block.get("on_unsupported"))
    if word is not None and word.strip().lower() == "fail":
        return refused(
            f"omni-fastpath: fastpath.on_unsupported is 'fail' and an error of ours is in the way: {error!r}"
        )
    os.environ.pop(variables.HANDOFF, None)  # an earlier configuration's is not this one's
    return None
