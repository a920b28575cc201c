"""The engines that were started in this process under our configuration, so that none loses a patch that it uses.

Upstream plans an engine's stages in the thread that then runs its orchestrator (in the parent of several API servers,
in the main thread): the engine lives while that thread does.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from weakref import WeakKeyDictionary

_engines: WeakKeyDictionary[threading.Thread, frozenset[str]] = WeakKeyDictionary()


def started(patches: Collection[str]) -> None:
    """An engine starts in this thread, and asked for these patches."""
    _engines[threading.current_thread()] = frozenset(patches)


def user_of(patch: str) -> str | None:
    """Who would be left without the patch, if it were taken off now."""
    for thread, patches in list(_engines.items()):
        if patch in patches and thread.is_alive():
            return "an engine that asked for it is running"
    return None
