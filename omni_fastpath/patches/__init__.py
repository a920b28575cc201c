"""The patches, one folder each, in the order in which they are installed. How to add one, and what the states mean.

The machinery reads ``PATCHES`` and knows no patch by name. No patch imports another.

To add a patch ``NAME``, with ``nonblocking_dequeue`` as a small example:

1. ``omni_fastpath/patches/NAME/__init__.py``: a docstring with one summary line and the seven headings that every patch
   has, which ``omni-fastpath explain`` prints, and ``PATCH = Patch(name="NAME", ...)``. A row declares its state on a
   release: a ``Fit`` if it is installed there, otherwise a ``Row`` (``omni_fastpath.declare``). Every upstream function
   that it writes is a ``Wrap``, ``Replace`` or ``Add`` in a ``Fit``. What it calls, and each class whose attributes it
   reads, is a ``Relies``. None is written that another patch writes. Where requests enter is followed by
   ``omni_fastpath.connection``. Attributes that no class declares are under Fragility. Every tested release is in one
   row. ``scripts/fingerprints.py``, run once with each release, records the fingerprints of all. Values are an
   ``Options`` model. There is at least one ``Counter``, and what else ``/metrics`` shows is a ``Metric``, whose samples
   come from ``figures()`` of the wrappers. Every process reads this file, so it imports only the standard library,
   pydantic and ``omni_fastpath.declare``.
2. ``patches/NAME/wrappers.py``: the functions that the declaration names. It is imported on install. A wrapper takes
   ``(wrapped, instance, args, kwargs)``. ``state_of("NAME")`` (``omni_fastpath.ledger``) has its values, its counters,
   and ``report`` for a state that is known later, such as a stage's. An exception of the patch must never reach
   upstream. The machinery ensures this for wrappers (``guard.guard_wrapper``). Other functions that upstream calls,
   such as a callback or a method of a subclass, use ``PatchState.guard`` or ``PatchState.fail``. ``step_aside()``, if
   the module has that function, releases everything that others wait for. A library that it calls is in
   ``guard._LIBRARIES``.
3. This file: the import, and its place in ``PATCHES``, after the patches that it requires.
4. ``tests/patches/test_NAME.py``: users get the same with the patch and without it. A scenario in
   ``test_errors_of_ours.py``: the same with an exception at any line of the patch.
5. ``README.md``: a row in the table of patches. ``docs/how-it-works.md``: its place in the drawing. ``CHANGELOG.md``: a
   line. ``scripts/pages.py`` writes the tables of ``docs/configuration.md`` and ``docs/operations.md``.

``tests/test_declarations.py`` checks the names of a new patch, its releases, the defaults and limits of its values, and
that each counter is written. ``tests/tools/test_cli.py`` checks the headings. ``tests/test_lifecycle.py`` installs it
on the real upstream and uninstalls it. ``tests/test_readme.py`` compares the generated tables.

The states of a patch in one process:

- ``off``: not enabled here. Every slot has upstream's own object.
- ``applied``: its wrappers are installed. Its counters show whether it took effect.
- ``not_applicable``: enabled, but this process, stage or mode has no use for it.
- ``superseded``: upstream itself does here what the patch would do.
- ``unsupported``: there is no row for the release or for one with the same code, or a seam is not as declared.
  Upstream's own code runs.
- ``failed``: an exception of the patch. During installation everything is undone. Later, upstream's own code continues.

A patch that requires a patch that cannot serve has the same state as that one. Under ``on_unsupported: fail`` the last
two states abort a server's start.
"""

from __future__ import annotations

if __name__ != "omni_fastpath.patches":
    # A second module object would hold a second set of declarations and install everything twice.
    raise ImportError(f"import omni_fastpath.patches, not {__name__}")

from omni_fastpath.declare import Patch
from omni_fastpath.patches.abandoned_chunks import PATCH as ABANDONED_CHUNKS
from omni_fastpath.patches.admission_limit import PATCH as ADMISSION_LIMIT
from omni_fastpath.patches.budgeted_drain import PATCH as BUDGETED_DRAIN
from omni_fastpath.patches.connections import PATCH as CONNECTIONS
from omni_fastpath.patches.delivery import PATCH as DELIVERY
from omni_fastpath.patches.forward_gate import PATCH as FORWARD_GATE
from omni_fastpath.patches.lean_front_end import PATCH as LEAN_FRONT_END
from omni_fastpath.patches.lean_processing import PATCH as LEAN_PROCESSING
from omni_fastpath.patches.nonblocking_dequeue import PATCH as NONBLOCKING_DEQUEUE
from omni_fastpath.patches.queue_metrics import PATCH as QUEUE_METRICS
from omni_fastpath.patches.save_queue_cap import PATCH as SAVE_QUEUE_CAP
from omni_fastpath.patches.submission_errors import PATCH as SUBMISSION_ERRORS

PATCHES: tuple[Patch, ...] = (
    NONBLOCKING_DEQUEUE,
    BUDGETED_DRAIN,
    CONNECTIONS,
    DELIVERY,
    ADMISSION_LIMIT,
    SUBMISSION_ERRORS,
    SAVE_QUEUE_CAP,
    ABANDONED_CHUNKS,
    FORWARD_GATE,
    LEAN_FRONT_END,
    LEAN_PROCESSING,
    QUEUE_METRICS,
)
"""Every patch, after those that it requires."""
