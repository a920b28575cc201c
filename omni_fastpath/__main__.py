"""``python -m omni_fastpath`` is ``omni-fastpath``."""

from __future__ import annotations

import sys

from omni_fastpath.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
