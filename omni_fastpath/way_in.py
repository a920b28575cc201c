"""Requests on their way in, for the loop that drains outputs. Empty if no patch records them."""

from __future__ import annotations

NOT_AT_A_STAGE: set[str] = set()
"""Ids of requests that were handed to the orchestrator and have not reached a stage yet. Both threads write it, because
each change is one step of the interpreter."""
