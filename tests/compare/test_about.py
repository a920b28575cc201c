"""A result line says where it comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from omni_fastpath.compare import about


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
    """What a serving process imports never brings omni_fastpath.compare with it."""
    code = (
        "import sys, omni_fastpath.bootstrap, omni_fastpath.config, omni_fastpath.install, omni_fastpath.publish,"
        " omni_fastpath.hooks, omni_fastpath.patches, omni_fastpath.handoff;"
        "print([name for name in sys.modules if name.startswith('omni_fastpath.compare')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
