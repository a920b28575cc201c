"""Incoming requests that no stage has yet. It is empty unless a patch keeps it."""

from __future__ import annotations

PENDING: set[str] = set()
"""The ids of requests that were handed to the orchestrator and have not reached a stage. Both threads change it, and
each change is atomic."""
