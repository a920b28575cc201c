"""``python -m tests.matrix [RELEASE ...]``: our built wheel on each release, against that release's own wheels.

    make matrix
    make matrix RELEASE="0.22.0 0.30.0"
    python -m tests.matrix 0.30.0 --parts seams cycle
    make matrix-ci

Of each release: what ``omni-fastpath status --verify`` says of every patch; one life cycle, which must leave the very
objects that were there; the tests that are marked ``every_release``; and on some a real server, stock and fastpath,
whose answers are compared. The table is printed; results/matrix.json has everything, with date and versions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import functools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.table import Table

from benchmarks.rigs import overlays
from benchmarks.rigs.results import progress
from benchmarks.rigs.side_by_side import guarded
from omni_fastpath.declare import Patch, Process, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.ab.about import about
from tests.matrix import behaviour, served
from tests.matrix.workplace import MatrixError, Workplace, tail

PARTS = ("seams", "cycle", "tests", "server")
IN_MAKE_TEST = ("tests", "server")
"""What ``make test`` has of the installed release, without a wheel."""
CHILD_TIMEOUT_S = 300.0
FITS = {State.APPLIED.value: "fit"}
RESULT = overlays.ROOT / "results" / "matrix.json"

Found = dict[str, Any]
"""Of a release: by part what it found, ``problems`` and ``seconds``."""

Part = Callable[[Workplace, str], tuple[Any, list[str]]]
"""Looks at a release: what it found, and what is wrong with that."""


# ---- What a release is looked at for ----


def seams(place: Workplace, release: str) -> tuple[Any, list[str]]:
    """What the installed wheel's ``status --verify`` says of each patch: its problems, none where all seams fit.

    Raises:
        MatrixError: It printed no report.
    """
    done = place.python(release, "-m", "omni_fastpath", "status", "--verify", "--json", timeout_s=CHILD_TIMEOUT_S)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise MatrixError(f"status --verify on {release} printed no report:\n{tail(done)}") from error
    installation, verified = report["installation"], dict[str, list[str]](report["verify"])
    problems = [
        f"{patch.name}: {problem}"
        for patch in PATCHES
        for problem in verified[patch.name]
        if patch.state_on(release) is not State.UNSUPPORTED
    ]
    if not installation["entry_points"]:
        problems.append("no entry point of the wheel is visible")
    found = {
        "vllm_omni": installation["vllm_omni"],
        "vllm": installation["vllm"],
        "declared": {patch.name: patch.state_on(release).value for patch in PATCHES},
        "patches": verified,
        "compared": report["compared"],
    }
    if (installation["vllm_omni"] or {}).get("version") != release:
        problems.append(f"the release is {installation['vllm_omni']}")
    return found, problems


def cycle(place: Workplace, release: str) -> tuple[Any, list[str]]:
    """Install and undo in a fresh process.

    Raises:
        MatrixError: It failed.
    """
    done = place.python(release, "-m", "tests.matrix.cycle", timeout_s=CHILD_TIMEOUT_S)
    if done.returncode:
        raise MatrixError(f"the life cycle on {release} ended with status {done.returncode}:\n{tail(done)}")
    found = json.loads(done.stdout.splitlines()[-1])
    problems = [f"not put back: {slot}" for slot in found["left"]]
    for patch in PATCHES:
        wanted, state = patch.state_on(release).value, found["states"][patch.name]
        if state["state"] != wanted:
            problems.append(f"{patch.name} is {state['state']} ({state['reason']}), its rows say {wanted}")
    if not Path(found["where"]["omni_fastpath"]).is_relative_to(place.site):
        problems.append(f"omni_fastpath was imported from {found['where']['omni_fastpath']}, which is not the wheel")
    overlay = overlays.folder(release)
    if overlay is not None and not Path(found["where"]["vllm_omni"]).is_relative_to(overlay):
        problems.append(f"vllm_omni was imported from {found['where']['vllm_omni']}")
    return found, problems


def tests(place: Workplace, release: str) -> tuple[Any, list[str]]:
    """The tests for every release."""
    found = behaviour.run(place, release)
    problems = [f"{name}: {message}" for name, message in found.failed.items()]
    if not found.passed:
        problems.append("no test was run")
    return dataclasses.asdict(found), problems


def server(place: Workplace, release: str, device: str) -> tuple[Any, list[str]]:
    """A real server on a simulated device, where this release gets one."""
    if release not in served.SERVERS:
        return None, []
    found = served.run(place, release, device)
    problems = list(found.parity["differences"])
    for patch in PATCHES:
        wanted = patch.state_on(release)
        if wanted is State.UNSUPPORTED or not (found.has_stages or Process.SERVER in patch.processes):
            continue  # nothing is promised, or it has no process here
        said = found.states.get(patch.name, {})
        # A patch of the server is not_applicable in the stages, and the other way round.
        if not any(each.startswith(f"{wanted.value}:") for each in said.values()):
            problems.append(f"{patch.name} is nowhere {wanted.value}: {said}")
        troubled = {role: each for role, each in said.items() if State(each.partition(":")[0]).is_trouble}
        problems += [f"{patch.name} in {role} is {each}" for role, each in troubled.items()]
    return dataclasses.asdict(found), problems


# ---- The run ----


def for_ci() -> tuple[str, ...]:
    """The oldest release, the newest that is out, and what is in preview."""
    known = overlays.releases()
    out = [each for each in known if not Version(each).is_prerelease]
    return tuple(each for each in known if each in {out[0], out[-1]} or each not in out)


def parts_of(release: str, parts: Sequence[str], *, ci: bool) -> tuple[str, ...]:
    """What a release is looked at for: in CI, of the installed one, what ``make test`` has not."""
    known = IN_MAKE_TEST if ci and overlays.folder(release) is None else ()
    return tuple(part for part in parts if part not in known)


def look(place: Workplace, release: str, parts: Sequence[str], device: str) -> Found:
    """Look at one release; whatever goes wrong in a part is a problem of that part."""
    found: Found = {"problems": {}, "seconds": {}}
    try:
        overlays.fetch(release)
    except RuntimeError as error:
        found["problems"]["seams"] = [str(error)]
        return found
    runs: Sequence[Part] = (seams, cycle, tests, functools.partial(server, device=device))
    for name, part in zip(PARTS, runs, strict=True):
        if name not in parts:
            continue
        progress(f"{release}: {name}")
        with _timed(found["seconds"], name):
            try:
                found[name], problems = part(place, release)
            except Exception as error:  # the other releases are looked at all the same
                found[name], problems = None, [f"{type(error).__name__}: {error}"]
        found["problems"][name] = problems
    return found


@contextlib.contextmanager
def _timed(into: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        into[name] = round(time.monotonic() - began, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the releases.

    Returns:
        0: every one is as its rows say. 1: one is not. 2: usage. 130: interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="all of scripts/releases.txt unless given")
    parser.add_argument(
        "--ci",
        action="store_true",
        help="the oldest release, the newest and what is in preview; of the installed one only what make test has not",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--device", choices=(served.STAGES, served.LIGHT), default=served.STAGES, help="1: stages; light: light engines"
    )
    options = parser.parse_args(argv)
    releases = options.releases or (for_ci() if options.ci else overlays.releases())
    if unknown := sorted(set(releases) - set(overlays.releases())):
        parser.error(f"found {', '.join(unknown)}, allowed: {', '.join(overlays.releases())}")
    return guarded("The matrix", lambda console: _run(releases, options, console))


def _run(releases: Sequence[str], options: argparse.Namespace, console: Console) -> int:
    said, began, found = about(), time.monotonic(), dict[str, Found]()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        place = Workplace(Path(folder))
        progress("our wheel")
        place.build()
        for release in releases:
            found[release] = look(place, release, parts_of(release, options.parts, ci=options.ci), options.device)
            result = {
                "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
                "about": said,
                "seconds": round(time.monotonic() - began, 1),
                "releases": found,
            }
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, console)
    return 1 if any(problems for each in found.values() for problems in each["problems"].values()) else 0


# ---- What is shown ----


def show(result: Mapping[str, Any], console: Console) -> None:
    """A row for each release, a row for each patch, and every problem."""
    releases: Mapping[str, Found] = result["releases"]
    table = Table(title=f"{result['date']}, {result['seconds'] / 60:.1f} minutes")
    for column in ("vllm-omni", "vllm", "seams", "life cycle", "tests", "server", "seconds"):
        table.add_column(column)
    for release, found in releases.items():
        vllm = ((found.get("seams") or {}).get("vllm") or {}).get("version", "")
        seconds = " + ".join(f"{each:.0f}" for each in found["seconds"].values())
        table.add_row(release, vllm, *(cell(found, part) for part in PARTS), seconds)
    console.print(table)
    patches = Table("patch", *releases)
    for patch in PATCHES:
        patches.add_row(patch.name, *(state_of(patch, found) for found in releases.values()))
    if any("cycle" in found for found in releases.values()):
        console.print(patches)
    for release, found in releases.items():
        for part, problems in found["problems"].items():
            for problem in problems:
                console.print(f"{release}, {part}: {problem}", markup=False, highlight=False, soft_wrap=True)


def cell(found: Found, part: str) -> str:
    """What a part found, in a word or two."""
    if part not in found["problems"]:
        return ""
    if problems := found["problems"][part]:
        return f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    about_part = found[part]
    if part == "seams":
        counts = Counter(about_part["declared"].values())
        return ", ".join(f"{count} {FITS.get(state, state)}" for state, count in counts.items())
    if part == "cycle":
        return f"{len(about_part['held'])} slots, all put back"
    if part == "tests":
        skipped = len(about_part["skipped"])
        return f"{about_part['passed']} passed" + (f", {skipped} skipped" if skipped else "")
    return "none" if about_part is None else f"{about_part['parity']['comparisons']} answers alike"


def state_of(patch: Patch, found: Found) -> str:
    """What a patch was in the life cycle."""
    states = (found.get("cycle") or {}).get("states", {})
    return str(states.get(patch.name, {}).get("state", ""))


if __name__ == "__main__":
    sys.exit(main())
