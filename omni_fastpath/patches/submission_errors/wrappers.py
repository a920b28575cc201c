"""The wrapper of ``submission_errors`` around the submission of a request to its stages."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError
from zmq.error import ZMQError

from omni_fastpath.guard import AwaitedCall
from omni_fastpath.ledger import logger, state_of

_patch = state_of("submission_errors")
_counters = _patch.counters
_guard = _patch.guard("failing a request alone")

_NOT_OF_THE_REQUEST = (EngineDeadError, MemoryError, OSError, ZMQError)
"""Errors that are not about the request. The next one would get them too."""


async def wrapped_submission(wrapped: AwaitedCall, instance: Any, args: Any, kwargs: Any) -> None:
    """Submit a request. An exception of upstream about the request fails only that request."""
    try:
        await wrapped(*args, **kwargs)
    except _NOT_OF_THE_REQUEST:
        raise
    except Exception as error:
        if wrapped.raised(error) and not _patch.has_failed:
            with _guard:
                await _fail(instance, args[0] if args else kwargs["msg"], error)
                return
        raise  # ends the orchestrator, as without this patch


async def _fail(orchestrator: Any, message: Any, error: Exception) -> None:
    """Fail a request through upstream's helper. The parent of a companion fails with it."""
    request = getattr(message, "parent_id", None) or message.request_id
    logger.warning("omni-fastpath: request %s could not be submitted and fails alone", request, exc_info=error)
    _counters["failed_alone"] += 1
    words = f"The request could not be submitted: {type(error).__name__}: {error}"
    encodable = words.encode(errors="backslashreplace").decode()
    await orchestrator._fail_request_client_error(request, getattr(message, "entry_stage_id", 0), encodable)
