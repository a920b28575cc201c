"""What all releases share: our wheel, unpacked, and a copy of the tests; and a process of a release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.rigs import overlays
from benchmarks.rigs.server import OFFLINE
from omni_fastpath.tools.ab.arm import clean
from omni_fastpath.tools.ab.errors import MeasureError

QUIET: Mapping[str, str] = {**OFFLINE, "PYTHONDONTWRITEBYTECODE": "1"}  # the log's level is what some tests look at
TAIL = 3000


class MatrixError(MeasureError):
    """Something could not be looked at; the message has the end of its output."""


class Workplace:
    """A folder with what the processes of all releases import.

    Attributes:
        site: Our wheel, installed.
        tests: A folder with the tests and what they run on, from which our package cannot be imported.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site, self.tests = folder / "site", folder / "tests"

    def build(self) -> None:
        """Build our wheel from this checkout, install it, and copy the tests.

        Raises:
            MatrixError: The wheel cannot be built or installed.
        """
        dist = self.folder / "dist"
        _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)], overlays.ROOT)
        [wheel] = dist.glob("*.whl")
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(self.site)]
        _run([*install, str(wheel)], self.folder)
        for name in ("tests", "benchmarks"):
            # Not the editable device: it is installed in .venv, under its own name.
            ignored = shutil.ignore_patterns("__pycache__", "simulated_device" if name == "benchmarks" else "")
            shutil.copytree(overlays.ROOT / name, self.tests / name, ignore=ignored)
        shutil.copy2(overlays.ROOT / "pyproject.toml", self.tests)

    def environment(self, release: str) -> dict[str, str]:
        """Of a process on a release: nothing of ours from this shell gets through."""
        return {**clean(), **QUIET, "PYTHONPATH": overlays.python_path(release, self.site, self.tests)}

    def python(self, release: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run the interpreter on a release, whatever its exit status.

        Raises:
            MatrixError: It took too long.
        """
        command = [sys.executable, "-W", "ignore", *arguments]
        try:
            return subprocess.run(
                command,
                env=self.environment(release),
                cwd=self.tests,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise MatrixError(f"{' '.join(arguments)} on {release} took more than {timeout_s:.0f} s") from error


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a process said."""
    return f"{done.stdout[-TAIL:]}\n{done.stderr[-TAIL:]}".strip()


def _run(command: list[str], where: Path) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MatrixError(f"{' '.join(command)} ended with status {done.returncode}:\n{tail(done)}")
