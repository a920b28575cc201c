"""The patches, one folder each, in the order in which they are installed; how to add one; what their states mean.

The machinery reads ``PATCHES`` and knows no patch by name; no patch imports another.

To add a patch ``NAME``, with ``final_output_wakeup`` as an example of a small one:

1. ``patches/NAME/__init__.py``: a docstring of one summary line and the seven headings that every patch has, which is
   the page that ``omni-fastpath explain`` prints, and ``PATCH = Patch(name="NAME", ...)``. What it is on a release is a
   row: a ``Fit`` where it is installed, else a ``Row`` (``omni_fastpath.declare``). Every upstream function that it
   writes or calls is a seam, in a ``Fit``, of the kind that fits (``Wrap``, ``Replace``, ``Add``, ``Call``, ``Pin``).
   Attributes that it reads are ``Reads``; what no class declares is named under Fragility. ``scripts/functions.py``
   notes what the functions are on each release. Values are an ``Options`` model, figures are
   ``Counter``s, and what else ``/metrics`` shows ``Metric``s. It is read in every process, so that it imports nothing
   but the standard library, pydantic and ``omni_fastpath.declare``.
2. ``patches/NAME/wrappers.py``: the functions that the declaration names, imported on install and only then. A wrapper
   takes ``(wrapped, instance, args, kwargs)``. ``runtime("NAME")`` (``omni_fastpath.ledger``) has its values and its
   counters, and ``report`` for a state that shows later, as a stage's. An exception of ours never reaches upstream.
   The machinery sees to that in a wrapper (``Entry.guarded``). Whatever else upstream calls, such as a callback or a
   method of a subclass, does it by ``Entry.guard`` or ``Entry.fail``. What others wait for is released by
   ``taken_off()``, if the module has that function.
3. This file: the import, and its place in ``PATCHES``, after what it requires.
4. ``tests/patches/test_NAME.py``: everybody gets the same with the patch and without it. A scenario in
   ``test_errors_of_ours.py``: the same with an exception of ours at any line.
5. ``README.md``: a row in the table of patches. ``scripts/pages.py`` writes the tables of
   ``docs/configuration.md`` and ``docs/operations.md``. ``CHANGELOG.md``: a line.

Of a new patch ``tests/test_declarations.py`` asks for the headings, for defaults and limits of its values, and that
each counter that it names is there. ``tests/test_lifecycle.py`` installs it on the real upstream and takes it off
again. ``tests/test_readme.py`` looks for it in the pages.

The states of a patch in one process:

- ``off``: not asked for here; every slot is upstream's own object.
- ``applied``: its slots hold ours. Its counters say whether it took effect.
- ``not_applicable``: it was asked for, and this process, stage or mode has no use for it.
- ``superseded``: upstream does here what it would do.
- ``unsupported``: it has no row for the release and for none of the same code, or a seam is not as declared.
  Upstream's own code runs.
- ``failed``: an error of ours. On install everything was put back; later on the patch stepped aside.

What requires a patch that cannot serve has that one's state. Under ``on_unsupported: fail`` the last two refuse a
server's start.
"""

from __future__ import annotations

if __name__ != "omni_fastpath.patches":
    # A second module object would hold a second set of declarations and install everything twice.
    raise ImportError(f"import omni_fastpath.patches, not {__name__}")

from omni_fastpath.declare import Patch
from omni_fastpath.patches.admission_limit import PATCH as ADMISSION_LIMIT
from omni_fastpath.patches.budgeted_drain import PATCH as BUDGETED_DRAIN
from omni_fastpath.patches.deadline_order import PATCH as DEADLINE_ORDER
from omni_fastpath.patches.final_output_wakeup import PATCH as FINAL_OUTPUT_WAKEUP
from omni_fastpath.patches.forward_gate import PATCH as FORWARD_GATE
from omni_fastpath.patches.lean_front_end import PATCH as LEAN_FRONT_END
from omni_fastpath.patches.lean_processing import PATCH as LEAN_PROCESSING
from omni_fastpath.patches.nonblocking_dequeue import PATCH as NONBLOCKING_DEQUEUE
from omni_fastpath.patches.queue_metrics import PATCH as QUEUE_METRICS
from omni_fastpath.patches.requests_first import PATCH as REQUESTS_FIRST
from omni_fastpath.patches.save_queue_cap import PATCH as SAVE_QUEUE_CAP
from omni_fastpath.patches.submission_errors import PATCH as SUBMISSION_ERRORS

PATCHES: tuple[Patch, ...] = (
    NONBLOCKING_DEQUEUE,
    BUDGETED_DRAIN,
    DEADLINE_ORDER,
    FINAL_OUTPUT_WAKEUP,
    REQUESTS_FIRST,
    ADMISSION_LIMIT,
    SUBMISSION_ERRORS,
    SAVE_QUEUE_CAP,
    FORWARD_GATE,
    LEAN_FRONT_END,
    LEAN_PROCESSING,
    QUEUE_METRICS,
)
"""Every patch, after those that it requires."""
