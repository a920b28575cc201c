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


async def wrapped_dispatch(wrapped: AwaitedCall, orchestrator: Any, args: Any, kwargs: Any) -> bool:
    """Submit a request to one stage, from its message or from the output of the stage before. False if it failed."""
    return await _submit(wrapped, orchestrator, args, kwargs, kwargs["req_id"], kwargs["stage_id"]) or False


async def wrapped_submission(wrapped: AwaitedCall, orchestrator: Any, args: Any, kwargs: Any) -> None:
    """Handle the message of a request. Its parent fails in the place of a companion."""
    message = args[0] if args else kwargs["msg"]
    request = getattr(message, "parent_id", None) or message.request_id
    await _submit(wrapped, orchestrator, args, kwargs, request, getattr(message, "entry_stage_id", 0))


async def _submit(wrapped: AwaitedCall, orchestrator: Any, args: Any, kwargs: Any, request: str, stage_id: int) -> Any:
    """Call upstream. An exception of upstream about the request fails only that request, and gives None."""
    try:
        return await wrapped(*args, **kwargs)
    except _NOT_OF_THE_REQUEST:
        raise
    except Exception as error:
        if _patch.has_failed or not wrapped.raised(error):
            raise
        with _guard:
            await _fail(orchestrator, request, stage_id, error)
            return None
        wrapped.on_purpose(error)
        raise  # ends the orchestrator, as without this patch


async def _fail(orchestrator: Any, request: str, stage_id: int, error: Exception) -> None:
    """Fail a request through upstream's helper."""
    logger.warning("omni-fastpath: request %s could not be submitted and fails alone", request, exc_info=error)
    _counters["failed_alone"] += 1
    words = f"The request could not be submitted: {type(error).__name__}: {error}"
    encodable = words.encode(errors="backslashreplace").decode()
    await orchestrator._fail_request_client_error(request, stage_id, encodable)
