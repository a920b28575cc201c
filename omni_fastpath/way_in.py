"""Requests on their way in, for whoever drains outputs: there are none while no patch keeps count of them."""

from __future__ import annotations

SUBMITTED: set[str] = set()
"""Ids of requests that were handed to the orchestrator and are not with a stage yet, written on both threads: each
change is one step of the interpreter."""
