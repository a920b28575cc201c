"""The patches, one folder each, in the order in which they are installed.

The machinery reads ``PATCHES`` and knows no patch by name; no patch imports another.
"""

from __future__ import annotations

if __name__ != "omni_fastpath.patches":
    # A second module object would hold a second set of declarations and install everything twice.
    raise ImportError(f"import omni_fastpath.patches, not {__name__}")

from omni_fastpath.declare import Patch
from omni_fastpath.patches.budgeted_drain import PATCH as BUDGETED_DRAIN
from omni_fastpath.patches.final_output_wakeup import PATCH as FINAL_OUTPUT_WAKEUP
from omni_fastpath.patches.forward_gate import PATCH as FORWARD_GATE
from omni_fastpath.patches.lean_processing import PATCH as LEAN_PROCESSING
from omni_fastpath.patches.nonblocking_dequeue import PATCH as NONBLOCKING_DEQUEUE
from omni_fastpath.patches.save_queue_cap import PATCH as SAVE_QUEUE_CAP

PATCHES: tuple[Patch, ...] = (
    NONBLOCKING_DEQUEUE,
    BUDGETED_DRAIN,
    FINAL_OUTPUT_WAKEUP,
    SAVE_QUEUE_CAP,
    FORWARD_GATE,
    LEAN_PROCESSING,
)
"""Every patch; a patch stands after those that it requires."""
