"""omni-fastpath: makes the outputs of an installed vLLM-Omni arrive sooner under load.

Nothing of vLLM or vLLM-Omni is edited; every change is a named patch with its own switch (``ARCHITECTURE.md``).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("omni-fastpath")
except PackageNotFoundError:  # run from an uninstalled tree
    __version__ = "0+uninstalled"

HANDOFF = "_OMNI_FASTPATH_HANDOFF"
"""The variable that carries a parent's configuration to its stages (``handoff``); outside the ``OMNI_FASTPATH``
namespace, in which it would be an unknown name."""

__all__ = ["HANDOFF", "__version__"]
