"""Who imports whom in the package: layers, and two halves: what runs inside a server and what people run beside it."""

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


def test_no_module_is_in_a_circle_and_layers_are_seven() -> None:
    """No circle, also through imports in functions. Those at the heads of files make at most seven layers.

    What only a type checker imports does not count.
    """
    paths = {file: file.relative_to(PACKAGE.parent).with_suffix("").parts for file in PACKAGE.rglob("*.py")}
    files = {".".join(path).removesuffix(".__init__"): file for file, path in paths.items()}
    for what in ("run", "head"):
        named = {name: {*_imported(file, what)} for name, file in files.items()}
        named = {name: each | {one.rpartition(".")[0] for one in each - files.keys()} for name, each in named.items()}
        above, layers = {name: each & files.keys() - {name} for name, each in named.items()}, 0
        while above:
            lowest = {name for name, each in above.items() if not each & above.keys()}
            assert lowest, f"in a circle, or above one: {sorted(above)}"
            above, layers = {name: each for name, each in above.items() if name not in lowest}, layers + 1
    assert layers <= 7


def _nodes(inside: ast.AST, what: str) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(inside):
        if what == "all" or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            if what != "head" or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _nodes(node, what)


def _imported(file: Path, what: str = "all") -> Iterator[str]:
    """Names of modules, and of what is taken from them: of all imports, of those that ``run``, or at the ``head``."""
    for node in _nodes(ast.parse(file.read_text(encoding="utf-8")), what):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level < 2, "a relative import stays in its folder"
            inside = ".".join(file.relative_to(PACKAGE.parent).parts[:-1]) if node.level else None
            module = ".".join(filter(None, (inside, node.module)))
            yield from (f"{module}.{each.name}" for each in node.names)
