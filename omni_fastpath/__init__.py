"""omni-fastpath: makes the outputs of an installed vLLM-Omni arrive sooner under load.

Nothing of vLLM or vLLM-Omni is edited; every change is a named patch with its own switch (``ARCHITECTURE.md``).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("omni-fastpath")
except PackageNotFoundError:  # run from an uninstalled tree
    __version__ = "0+uninstalled"

__all__ = ["__version__"]
