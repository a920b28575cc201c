#!/usr/bin/env python
"""Writes ``omni_fastpath/fingerprints/RELEASE.json``: the fingerprint of all that declarations name, as installed here.

    PYTHONPATH=.cache/releases/0.28.0 .venv/bin/python scripts/fingerprints.py

Run it after a change of the seams, once for each release, and for a release that gets a row. Read the bodies that the
difference shows before you commit it. Functions of other packages go into ``libraries.json``, where each version that
was read adds a fingerprint.
"""

from __future__ import annotations

import json
from pathlib import Path

from omni_fastpath.declare import Add
from omni_fastpath.install import row_here
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from omni_fastpath.seams import FINGERPRINTS, UPSTREAM, as_read, find


def written(file: Path, functions: dict[str, list[str]]) -> None:
    """Write a file, a line for each function or class."""
    lines = (f"  {json.dumps(path)}: {json.dumps(functions[path])}" for path in sorted(functions))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Look at the installed release."""
    here = vllm_omni_release()
    if here is None:
        raise SystemExit("vllm-omni is not installed")
    rows = (row_here(patch) for patch in PATCHES)
    libraries = FINGERPRINTS / "libraries.json"
    found: dict[str, list[str]] = {}
    others: dict[str, list[str]] = json.loads(libraries.read_text(encoding="utf-8")) if libraries.exists() else {}
    for seam in (seam for row in rows if row is not None for seam in row.seams if not isinstance(seam, Add)):
        body = as_read(seam, find(seam).raw())
        if seam.module.partition(".")[0] in UPSTREAM:
            found[seam.path] = [body]
        else:
            others[seam.path] = sorted({body, *others.get(seam.path, [])})
    written(FINGERPRINTS / f"{here.version}.json", found)
    written(libraries, others)


if __name__ == "__main__":
    main()
