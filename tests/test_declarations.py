"""What every patch that ships must declare, and that what it declares is true."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from packaging.version import Version

from omni_fastpath.config import RULES
from omni_fastpath.declare import Add, Options, Patch, Wrap
from omni_fastpath.patches import PATCHES
from omni_fastpath.seams import FINGERPRINTS
from tests.fakes.processes import process

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "patches"
WORD = re.compile(r"[a-z][a-z0-9_]*")

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=[patch.name for patch in PATCHES])


def sources(patch: Patch) -> list[Path]:
    """The patch's files but the declaration."""
    return [file for file in sorted((FOLDER / patch.name).glob("*.py")) if file.name != "__init__.py"]


@each_patch
def test_names_and_releases_are_exact(patch: Patch) -> None:
    """The name is a unique lower-case word, and the patch's variable is not one of the package's own.

    Releases are sorted, and each is in one row.
    """
    assert WORD.fullmatch(patch.name)
    assert [each.name for each in PATCHES].count(patch.name) == 1
    assert patch.env == f"OMNI_FASTPATH_{patch.name.upper()}"
    assert patch.name not in (*RULES, "fastpath")
    assert 0 < len(patch.summary) <= 90
    assert patch.fits
    assert list(patch.releases) == sorted(set(patch.releases), key=Version)
    for row in patch.rows:
        assert row.releases
        assert all(re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", release) for release in row.releases)


def test_declared_folders_are_the_folders_on_disk() -> None:
    """Every folder is a declared patch, and every declared patch has a folder."""
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == {patch.name for patch in PATCHES}


def test_what_was_read_is_what_is_named() -> None:
    """Each release's file has exactly what declarations name, and one file has those of libraries."""
    rows = [(release, row) for patch in PATCHES for row in patch.rows for release in row.releases]
    libraries = json.loads((FINGERPRINTS / "libraries.json").read_text())
    assert {file.stem for file in FINGERPRINTS.iterdir()} == {"libraries", *(release for release, _ in rows)}
    of_all: set[str] = set()
    for release in sorted({release for release, _ in rows}):
        seams = [seam for each, row in rows if each == release for seam in row.seams]
        named = {seam.path for seam in seams if not isinstance(seam, Add)}
        read = json.loads((FINGERPRINTS / f"{release}.json").read_text())
        assert read.keys() == {path for path in named if path.startswith(("vllm.", "vllm_omni."))}
        assert all(len(each) == 1 for each in read.values())
        of_all |= named - read.keys()
    assert libraries.keys() == of_all
    for bodies in (*libraries.values(), *read.values()):
        assert all(re.fullmatch(r"[0-9a-f]{16}|\(.*\)", body) for body in bodies)


@pytest.mark.parametrize("release", sorted({each for patch in PATCHES for each in patch.releases}))
def test_a_function_is_written_by_one_patch(release: str) -> None:
    """On each release no slot is wrapped, replaced or added by two patches."""
    rows = [found[1] for patch in PATCHES if (found := patch.listed(release)) is not None]
    written = [{seam.path for seam in row.seams if isinstance(seam, (Wrap, Add))} for row in rows]
    assert len(rows) == len(PATCHES)
    assert [path for path, times in Counter(itertools.chain(*written)).items() if times > 1] == []


@each_patch
def test_metrics_are_named_as_prometheus_has_it(patch: Patch) -> None:
    """Names are unique, in the package's namespace and without reserved suffixes, and buckets are sorted."""
    names = [metric.name for each in PATCHES for metric in each.metrics]
    for metric in patch.metrics:
        assert re.fullmatch(r"omni_fastpath_[a-z_]+", metric.name)
        assert names.count(metric.name) == 1
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms"))
        assert not {"process", "stage", "replica", "le"} & set(metric.labels)
        assert metric.bounds is None or list(metric.bounds) == sorted({float(each) for each in metric.bounds})


@each_patch
def test_options_have_defaults_limits_and_descriptions(patch: Patch) -> None:
    """Every value has a default and a description, every number has two limits, and the defaults are valid."""
    assert issubclass(patch.options, Options)
    defaults = patch.options()
    assert patch.options.model_validate(defaults.model_dump()) == defaults
    for name, field in patch.options.model_fields.items():
        assert WORD.fullmatch(name)
        assert field.description, name
        if field.annotation in (int, float):
            limits = {type(each).__name__ for each in field.metadata}
            assert limits & {"Ge", "Gt"}, name
            assert limits & {"Le", "Lt"}, name


@each_patch
def test_every_declared_counter_is_written(patch: Patch) -> None:
    """The patch's code names each of its counters. One that is not declared raises where it is written."""
    code = "".join(file.read_text() for file in sources(patch))
    assert patch.counters
    for name in (counter.name for counter in patch.counters):
        assert f'"{name}"' in code or f'"{name.partition("_")[0]}_{{' in code, name
        assert WORD.fullmatch(name)


def test_machinery_knows_no_patch_by_name() -> None:
    """No file of the machinery, of the hooks or of doctor's rules contains a patch's name."""
    files = [file for of in ("omni_fastpath", "hooks") for file in (ROOT / of).glob("*.py")]
    files.append(ROOT / "omni_fastpath/tools/findings.py")
    assert [(file.name, each.name) for file in files for each in PATCHES if each.name in file.read_text()] == []


@pytest.mark.parametrize("name", ["patches", "hooks"])
def test_second_module_identity_is_refused(name: str) -> None:
    """Importing a package by its folder's name is refused with its real name."""
    run = process(sys.executable, "-c", f"import {name}")
    assert run.returncode == 1
    assert f"ImportError: import omni_fastpath.{name}, not {name}" in run.stderr
