"""What runs inside a server and what people run beside it are two halves."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_fastpath
from omni_fastpath.declare import Patch
from omni_fastpath.patches import PATCHES

PACKAGE = Path(omni_fastpath.__file__).parent
TOOLS = "omni_fastpath.tools"


REACHING_OUT = {"http", "marshal", "pickle", "shelve", "socket", "socketserver", "ssl", "subprocess", "urllib"}


def test_no_serving_module_imports_a_tool_or_reaches_out() -> None:
    """Nothing at the root, in patches or in hooks names a module of ``tools``, at its head or inside a function.

    Nor one that opens a socket, starts a program or reads pickles.
    """
    serving = [file for folder in (".", "patches", "hooks") for file in (PACKAGE / folder).resolve().rglob("*.py")]
    serving = [file for file in serving if "tools" not in file.relative_to(PACKAGE.parent).parts]
    found = {file.name for file in serving if any(f"{name}.".startswith(f"{TOOLS}.") for name in _imported(file))}
    assert found == {"__main__.py"}, "only ``python -m omni_fastpath`` is the command line"
    assert {"startup.py", "wrappers.py", "manager.py"} <= {file.name for file in serving}
    reaching = {(file.name, name) for file in serving for name in _imported(file)}
    assert not {each for each in reaching if each[1].partition(".")[0] in REACHING_OUT}


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.name for patch in PATCHES])
def test_a_patch_imports_no_other_patch(patch: Patch) -> None:
    """Patches share only the machinery, and a declaration imports only the standard library, pydantic and that."""
    own = f"{PACKAGE.name}.patches.{patch.name}."
    for file in (PACKAGE / "patches" / patch.name).glob("*.py"):
        names = [f"{name}." for name in _imported(file)]
        assert not [name for name in names if name.startswith("omni_fastpath.patches.") and not name.startswith(own)]
        if file.name == "__init__.py":
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "pydantic", PACKAGE.name}


def _imported(file: Path) -> Iterator[str]:
    """Names of modules, and of what is taken from them, anywhere in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, "a relative import stays in its folder"
            inside = ".".join(file.relative_to(PACKAGE.parent).parts[:-1]) if node.level else None
            module = ".".join(filter(None, (inside, node.module)))
            yield from (f"{module}.{each.name}" for each in node.names)
