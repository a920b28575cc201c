"""The tests that are marked ``every_release``, on a release."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.matrix.workplace import MatrixError, Workplace, tail

MARKER = "every_release"
TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Behaviour:
    """How the tests ended.

    Attributes:
        passed: How many.
        skipped: Each that was, and why.
        failed: Each that did, with the first line of its error.
    """

    passed: int
    skipped: dict[str, str]
    failed: dict[str, str]


def marked(tests: Path) -> list[Path]:
    """The files with such tests. Others are not even collected: they may import what a release does not have."""
    return sorted(path for path in tests.rglob("test_*.py") if f"mark.{MARKER}" in path.read_text(encoding="utf-8"))


def run(place: Workplace, release: str) -> Behaviour:
    """Run them.

    Raises:
        MatrixError: They could not be run.
    """
    report = place.folder / f"tests-{release}.xml"
    files = [str(path.relative_to(place.tests)) for path in marked(place.tests / "tests")]
    arguments = ["-q", "-p", "no:cacheprovider", "-m", f"{MARKER} and not server", f"--junitxml={report}", *files]
    done = place.python(release, "-m", "pytest", *arguments, timeout_s=TIMEOUT_S)
    if not report.exists():
        raise MatrixError(f"pytest on {release} ended with status {done.returncode}:\n{tail(done)}")
    return read(report)


def read(report: Path) -> Behaviour:
    """What a JUnit report says."""
    passed, skipped, failed = 0, dict[str, str](), dict[str, str]()
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest's own
        name = f"{case.get('classname')}.{case.get('name')}"
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if problem is not None:
            failed[name] = (problem.get("message") or "").splitlines()[0][:300] if problem.get("message") else "?"
        elif skip is not None:
            skipped[name] = skip.get("message") or ""
        else:
            passed += 1
    return Behaviour(passed, skipped, failed)
