"""Our built wheel on other releases, with their own wheels: ``python -m tests.matrix [RELEASE ...]``, ``make matrix``.

Of each release the tests that are marked ``every_release`` run, in processes whose ``PYTHONPATH`` begins with that
release's packages (`benchmarks.rigs.overlays`), then has our wheel, then a copy of the tests without the package beside
them. Two releases are tested at the same time, each in one process of pytest, because each further one imports upstream
again. What they say is printed when they have ended.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.rigs import overlays
from benchmarks.rigs.arm import clean
from omni_fastpath.patches import PATCHES

MARKER = "every_release"
IMPORTED = """
from omni_fastpath.releases import __file__, vllm_omni_release
print(__file__, vllm_omni_release().version)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build our wheel, install it into a folder, and copy the tests and what they run on into another."""
    site, tests = folder / "site", folder / "tests"
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(wheel, cwd=overlays.ROOT, check=True, stdout=subprocess.DEVNULL)
    [built] = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(built)]
    subprocess.run(pip, check=True)
    for name in ("tests", "benchmarks"):
        # Not the editable device: it is installed in .venv, under its own name.
        ignored = shutil.ignore_patterns("__pycache__", "simulated_device" if name == "benchmarks" else "")
        shutil.copytree(overlays.ROOT / name, tests / name, ignore=ignored)
    shutil.copy2(overlays.ROOT / "pyproject.toml", tests)
    return site, tests


def marked(tests: Path) -> list[str]:
    """The files with such tests. Others may import what a release does not have, and are not collected."""
    files = sorted(tests.rglob("test_*.py"))
    return [str(path.relative_to(tests)) for path in files if f"mark.{MARKER}" in path.read_text(encoding="utf-8")]


def run(release: str, site: Path, tests: Path) -> bool:
    """Run the tests on a release and print what they say; whether they passed.

    Raises:
        RuntimeError: The release cannot be had, or another one or another package of ours is imported.
    """
    overlays.fetch(release)
    paths = overlays.python_path(release, site, tests)
    # The log's level stays as it is: it is what some tests look at.
    environment = {**clean(os.environ), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    python = [sys.executable, "-W", "ignore"]
    said = subprocess.check_output([*python, "-c", IMPORTED], env=environment, cwd=tests, text=True)
    ours, found = said.splitlines()[-1].split()
    if not Path(ours).is_relative_to(site) or found != release:
        raise RuntimeError(f"on {release} the processes import {ours} and vLLM-Omni {found}")
    pytest = [*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKER, *marked(tests)]
    done = subprocess.run(pytest, env=environment, cwd=tests, check=False, capture_output=True, errors="replace")
    print(f"matrix: vLLM-Omni {release}", done.stdout, done.stderr, sep="\n", flush=True)  # noqa: T201
    return done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the releases; 1 if a test failed on one."""
    listed = {release for patch in PATCHES for release in patch.releases}  # others have a test of their own
    others = [each for each in overlays.releases() if overlays.folder(each) is not None and each in listed]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"{', '.join(others)} unless given")
    releases = parser.parse_args(argv).releases or others
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder, ThreadPoolExecutor(2) as pool:
        site, tests = build(Path(folder))
        passed = list(pool.map(lambda release: run(release, site, tests), releases))
    for release, each in zip(releases, passed, strict=True):
        print(f"matrix: {release} {'passed' if each else 'FAILED'}")  # noqa: T201
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
