"""Where requests enter, and which are on their way to a stage."""

from __future__ import annotations

from typing import Any

NOT_AT_A_STAGE: set[str] = set()
"""Ids of requests that were handed to the orchestrator and have not reached a stage yet. Both threads write it, because
each change is one step of the interpreter. Empty if no patch records them."""


def connection(scope: Any, receive: Any, send: Any) -> tuple[Any, Any, Any]:
    """The arguments of an ASGI application, however they were passed."""
    return scope, receive, send


def is_api_server(app: Any) -> bool:
    """Whether a FastAPI application is the one of upstream's API server, and not another one in the same process."""
    return hasattr(getattr(app, "state", None), "openai_serving_models")
