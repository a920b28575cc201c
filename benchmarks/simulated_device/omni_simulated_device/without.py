"""Parts of omni-fastpath's patches that have no option, taken out one by one, to find out what each is worth.

With names of `PARTS` in ``OMNI_SIMULATED_DEVICE_WITHOUT``, with commas, one object of the patch is replaced when its
module has been imported, so that upstream's code does that part. A word about each on standard error is the proof.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

SAID = "omni_simulated_device: omni-fastpath goes without %s in process %d"


PARTS: Mapping[str, tuple[str, str, Any]] = {
    "unseen_outputs": ("lean_processing.unseen", "_find_out", lambda *_: False),
    "late_sums": ("lean_processing.wrappers", "make_lean", lambda _: None),
    "token_ids": ("lean_processing.token_ids", "LeanState._is_plain", lambda _: False),
    "summary": ("lean_front_end.wrappers", "_table", lambda upstream, *args, **kwargs: upstream(*args, **kwargs)),
    "audio_files": ("lean_front_end.wrappers", "_file", lambda *_: None),
}
"""By name: a module of ``omni_fastpath.patches``, which of its objects is replaced, and by what."""


def take_out(names: str) -> None:
    """Replace each when its module is imported; may be called many times."""
    for name in names.split(","):
        module, path, replacement = PARTS[name]
        _when_imported(f"omni_fastpath.patches.{module}", _replacing(name, path, replacement))


def _replacing(name: str, path: str, replacement: Any) -> Callable[[Any], None]:
    def replace(module: Any) -> None:
        *owners, last = path.split(".")
        owner = module
        for each in owners:
            owner = getattr(owner, each)
        if getattr(owner, last) is not replacement:
            setattr(owner, last, replacement)
            print(SAID % (name, os.getpid()), file=sys.stderr, flush=True)

    return replace


def _when_imported(name: str, then: Callable[[Any], None]) -> None:
    wrapt: Any = importlib.import_module("wrapt")
    wrapt.register_post_import_hook(then, name)
