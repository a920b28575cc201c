"""Hooks, with which third parties watch the fast path.

A plugin is an object (or module) with functions marked ``@hookimpl``. It is found through the entry-point group
``omni_fastpath.hooks`` or registered with ``HOOKS.register``. ``specs`` describes when each hook is called.
"""

from __future__ import annotations

if __name__ != "omni_fastpath.hooks":
    # A second module object would have a second manager, and half of the plugins would never be called.
    raise ImportError(f"import omni_fastpath.hooks, not {__name__}")

from omni_fastpath.hooks.manager import HOOKS, HookManager
from omni_fastpath.hooks.specs import PassReport, hookimpl

__all__ = ["HOOKS", "HookManager", "PassReport", "hookimpl"]
