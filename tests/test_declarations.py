"""What every patch that ships must declare, and that what it declares is true."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pydantic
import pytest
from packaging.version import Version

from omni_fastpath.config import RULES
from omni_fastpath.declare import Function, Options, Patch, Reads
from omni_fastpath.install import start_seams
from omni_fastpath.patches import PATCHES
from omni_fastpath.seams import FUNCTIONS
from tests.fakes.processes import process

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "patches"
HEADINGS = ("What", "Why", "Why not a hook", "Scope", "Fragility", "Upstream thread", "Remove when")
WORD = re.compile(r"[a-z][a-z0-9_]*")

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=[patch.name for patch in PATCHES])


def sections(docs: str) -> dict[str, str]:
    """The text under each heading, in order."""
    found = re.split(r"^([A-Z][A-Za-z ]+):\n", docs, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def sources(patch: Patch) -> list[Path]:
    """The patch's files but the declaration."""
    return [file for file in sorted((FOLDER / patch.name).glob("*.py")) if file.name != "__init__.py"]


@each_patch
def test_docstring_has_every_heading(patch: Patch) -> None:
    """One summary line, then the seven headings in order with indented text; upstream's issue or PR is named."""
    assert patch.docs is not None
    summary, rest = patch.docs.split("\n", 1)
    assert re.fullmatch(r"[A-Z].+\.", summary)
    assert rest.startswith("\n")
    found = sections(patch.docs)
    assert tuple(found) == HEADINGS
    for heading, text in found.items():
        assert text.strip(), heading
        assert all(line.startswith("    ") for line in text.splitlines() if line), heading
    assert re.search(r"vllm(-omni)? (issue|PR) #\d+", found["Upstream thread"])


@each_patch
def test_names_fit_yaml_and_environment(patch: Patch) -> None:
    """The name is a word in lower case and no other patch's, and its variable is none of ours."""
    assert WORD.fullmatch(patch.name)
    assert "__" not in patch.name
    assert [each.name for each in PATCHES].count(patch.name) == 1
    assert patch.env == f"OMNI_FASTPATH_{patch.name.upper()}"
    assert patch.name not in (*RULES, "fastpath")
    assert 0 < len(patch.summary) <= 90
    assert patch.processes


def test_order_respects_requirements() -> None:
    """A patch stands after all that it requires."""
    before: set[str] = set()
    for patch in PATCHES:
        assert set(patch.requires) <= before, patch.name
        before.add(patch.name)


def test_declared_folders_are_the_folders_on_disk() -> None:
    """Every folder is a declared patch and the other way round."""
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == {patch.name for patch in PATCHES}


@each_patch
def test_seams_are_complete(patch: Patch) -> None:
    """Each function is named once, and of each class something is read."""
    for fit in patch.fits:
        named = [seam.path for seam in fit.seams if not isinstance(seam, Reads)]
        assert named
        assert len(set(named)) == len(named)
        assert all(seam.names for seam in fit.seams if isinstance(seam, Reads))


def test_what_was_read_is_what_is_named() -> None:
    """A file for each release, with its functions that a declaration names and no other; libraries' in one for all."""
    rows = [(release, row) for patch in PATCHES for row in patch.rows for release in row.releases]
    libraries = json.loads((FUNCTIONS / "libraries.json").read_text())
    assert {file.stem for file in FUNCTIONS.iterdir()} == {"libraries", *(release for release, _ in rows)}
    of_all: set[str] = set()
    for release in sorted({release for release, _ in rows}):
        seams = [*start_seams(None), *(seam for each, row in rows if each == release for seam in row.seams)]
        named = {seam.path for seam in seams if isinstance(seam, Function)}
        read = json.loads((FUNCTIONS / f"{release}.json").read_text())
        assert read.keys() == {path for path in named if path.startswith(("vllm.", "vllm_omni."))}
        assert all(len(each) == 2 for each in read.values())
        of_all |= named - read.keys()
    assert libraries.keys() == of_all
    for shape, *bodies in (*libraries.values(), *read.values()):
        assert re.fullmatch(r"(function|classmethod|staticmethod)\([\w, ]*\)", shape)
        assert all(re.fullmatch("[0-9a-f]{16}", body) for body in bodies)


@each_patch
def test_metrics_are_named_as_prometheus_has_it(patch: Patch) -> None:
    """In our namespace, once, with a unit that Prometheus knows; a histogram has its buckets in order."""
    names = [metric.name for each in PATCHES for metric in each.metrics]
    for metric in patch.metrics:
        assert re.fullmatch(r"omni_fastpath_[a-z_]+", metric.name)
        assert names.count(metric.name) == 1
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms"))
        assert not {"process", "stage", "replica", "le"} & set(metric.labels)
        assert metric.bounds is None or list(metric.bounds) == sorted({float(each) for each in metric.bounds})


@each_patch
def test_releases_are_exact(patch: Patch) -> None:
    """Releases are named one by one, oldest first, each in one row; what is not out yet, and no other, is a preview."""
    assert patch.fits
    assert list(patch.releases) == sorted(set(patch.releases), key=Version)
    for row in patch.rows:
        assert row.releases
        assert all(re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", release) for release in row.releases)
        assert {Version(release).is_prerelease for release in row.releases} == {row.preview}


@each_patch
def test_options_have_defaults_limits_and_descriptions(patch: Patch) -> None:
    """Every value has a default and a description, every number two limits; the defaults pass their own checks."""
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
    with pytest.raises(pydantic.ValidationError):
        patch.options.model_validate({"no_such_value": 1})


def _counters_used(tree: ast.AST) -> set[str]:
    """Keys of subscripts on something called counters; of a conditional both, of an f-string its shape."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and "counters" in ast.unparse(node.value):
            keys = [node.slice.body, node.slice.orelse] if isinstance(node.slice, ast.IfExp) else [node.slice]
            for key in keys:
                if isinstance(key, ast.Constant):
                    used.add(str(key.value))
                elif isinstance(key, ast.JoinedStr):
                    used.add("".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in key.values))
                else:
                    pytest.fail(f"a counter that cannot be read off the source: {ast.unparse(node)}")
    return used


@each_patch
def test_counters_used_are_the_counters_declared(patch: Patch) -> None:
    """The code writes every declared counter and no other."""
    used = set().union(*(_counters_used(ast.parse(file.read_text())) for file in sources(patch)))
    patterns = [re.escape(name).replace(r"\*", "[a-z_]+") for name in used]
    declared = {counter.name for counter in patch.counters}
    assert len(declared) == len(patch.counters)
    assert {name for name in declared if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()
    assert [p for p in patterns if not any(re.fullmatch(p, name) for name in declared)] == []
    assert declared
    assert all(WORD.fullmatch(counter.name) and counter.meaning for counter in patch.counters)


@each_patch
def test_patch_imports_no_other_patch(patch: Patch) -> None:
    """Patches share the machinery and nothing else; a declaration imports the standard library, pydantic and ours.

    A relative import of one dot stays in the patch's folder, and more dots leave it.
    """
    own = f"omni_fastpath.patches.{patch.name}"
    for file in sorted((FOLDER / patch.name).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{file}: {ast.unparse(node)}"
                inside = f"{own}.{node.module}" if node.module else own
                names = [inside if node.level else node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith("omni_fastpath.patches"):
                    assert f"{name}.".startswith(f"{own}."), f"{file}: {name}"
                if file.name == "__init__.py":
                    top = name.partition(".")[0]
                    assert top in {*sys.stdlib_module_names, "pydantic", "omni_fastpath"}, f"{file}: {name}"


def test_machinery_knows_no_patch_by_name() -> None:
    """No file of the machinery, of the hooks or of doctor's rules names one, in whatever text."""
    files = [file for of in ("omni_fastpath", "hooks") for file in (ROOT / of).glob("*.py")]
    files.append(ROOT / "omni_fastpath/tools/findings.py")
    assert [(file.name, each.name) for file in files for each in PATCHES if each.name in file.read_text()] == []


@pytest.mark.parametrize("name", ["patches", "hooks"])
def test_second_module_identity_is_refused(name: str) -> None:
    """Imported by its folder's name, where that is importable, a package says under which name it lives."""
    run = process(sys.executable, "-c", f"import {name}")
    assert run.returncode == 1
    assert f"ImportError: import omni_fastpath.{name}, not {name}" in run.stderr
