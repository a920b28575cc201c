"""Every release against its own wheels, with our built wheel installed: ``python -m tests.matrix``, ``make matrix``.

It stands among the tests and not among the benchmarks because it passes or fails, and measures nothing.

Each release runs in processes of its own, in which come first, on ``PYTHONPATH``, that release's packages
(`benchmarks.rigs.overlays`), then our wheel, then a copy of the tests without the package beside them. What is looked
at is in `workplace` (where), `cycle` (install and undo), `behaviour` (tests) and `served` (a real server).
"""
