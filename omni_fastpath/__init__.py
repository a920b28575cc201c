"""omni-fastpath: makes the outputs of an installed vLLM-Omni arrive sooner under load.

Nothing of vLLM or vLLM-Omni is edited; every change is a named patch with its own switch (``docs/how-it-works.md``).
"""

from __future__ import annotations

from omni_fastpath.releases import installed_release

__version__ = installed_release("omni-fastpath") or "0+uninstalled"
"""Of the installed distribution; ``0+uninstalled`` where the package is run from a tree."""

__all__ = ["__version__"]
