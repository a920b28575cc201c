"""A result line says where it comes from."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import omni_fastpath
from omni_fastpath.compare import about

PACKAGE = Path(omni_fastpath.__file__).parent


def test_a_result_line_names_versions_commit_and_machine() -> None:
    """What a figure needs to be made again is on its line."""
    found = about.about()
    assert found["versions"].keys() >= {"python", "omni-fastpath"}
    assert found["machine"].keys() == {"processor", "cores", "memory_gib"}
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 12
    assert found["date"].endswith("Z")


def test_an_installation_without_git_has_no_commit(tmp_path: Path) -> None:
    """Where the package was installed from a wheel the commit is None, not an error."""
    code = "import pathlib, omni_fastpath.compare.about as a; a.__file__ = '/none/a/b/c.py'; print(a.commit())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"


def test_no_serving_module_imports_the_comparison() -> None:
    """What a serving process imports never brings omni_fastpath.compare or omni_fastpath.ab with it."""
    code = (
        "import sys, omni_fastpath.bootstrap, omni_fastpath.admission, omni_fastpath.install, omni_fastpath.publish,"
        " omni_fastpath.hooks, omni_fastpath.patches, omni_fastpath.handoff;"
        "print([name for name in sys.modules if name.startswith(('omni_fastpath.compare', 'omni_fastpath.ab'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_but_the_command_line_may_import_the_comparison() -> None:
    """Nor later, inside a function; what serves has no use for it."""
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if not {"compare", "ab"} & {*file.relative_to(PACKAGE).parts}
        and any(name.startswith(("omni_fastpath.compare", "omni_fastpath.ab.")) for name in _imported(file))
    }
    assert found <= {"cli.py"}
    assert "omni_fastpath.compare.quantiles" in set(_imported(PACKAGE / "compare" / "verdict.py"))


def _imported(file: Path) -> Iterator[str]:
    """Names of modules, and of what is taken from them, anywhere in a file."""
    package = ("omni_fastpath", *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{each.name}" for each in node.names)
