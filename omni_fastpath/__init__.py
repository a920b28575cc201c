"""omni-fastpath: makes the outputs of an installed vLLM-Omni arrive sooner under load.

No file of vLLM or vLLM-Omni is changed. Every change is a named patch with its own switch (``docs/how-it-works.md``).
"""

from __future__ import annotations

from omni_fastpath.releases import installed_release

__version__ = installed_release("omni-fastpath") or "0+uninstalled"
"""The installed version. ``0+uninstalled`` if the package runs from a source tree that is not installed."""

__all__ = ["__version__"]
