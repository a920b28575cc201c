#!/usr/bin/env python
"""What an installation of omni-fastpath brings with it: name, version and licence of each distribution, as it is here.

Of ``pyproject.toml``'s dependencies and theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def brought(requirements: Iterable[str], seen: set[str]) -> Iterator[Distribution]:
    """The distributions that these requirements ask for here, and those that these ask for, each once."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name not in seen and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            seen.add(name)
            found = distribution(name)
            yield found
            yield from brought(found.requires or [], seen)


def licence(of: Distribution) -> str:
    """As its metadata says it: the expression, else its classifiers, else the first line of the old field."""
    said = of.metadata
    classifiers = [each for each in said.get_all("Classifier") or [] if each.startswith("License ::")]
    old = said.get("License", "").partition("\n")[0]
    named = ", ".join(each.rpartition(" :: ")[2] for each in classifiers)
    return said.get("License-Expression", "") or named or old or "UNKNOWN"


def main() -> int:
    """Print the list; 1 where something is not installed."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    try:
        for each in brought(project["dependencies"], set()):
            sys.stdout.write(f"{each.name:20} {each.version:12} {licence(each)}\n")
    except PackageNotFoundError as missing:
        sys.stderr.write(f"licences: {missing}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
