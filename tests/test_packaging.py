"""What is built is what is here: links, wheel, source distribution, and a wheel from that."""

from __future__ import annotations

import email.message
import email.parser
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"omni_fastpath/patches": "../patches", "omni_fastpath/hooks": "../hooks"}
ENTRY_POINT = "omni_fastpath.bootstrap:register"


def git(*arguments: str) -> list[str]:
    """The lines that git prints about this repository."""
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"this tree is no git repository: {run.stderr.strip()}")
    return run.stdout.splitlines()


def modules_here(root: Path = ROOT) -> set[str]:
    """The package's files in a checkout, the linked folders followed, by the names that they are imported under."""
    folders = {"omni_fastpath": "omni_fastpath", "patches": "omni_fastpath/patches", "hooks": "omni_fastpath/hooks"}
    return {
        f"{inside}/{file.relative_to(root / folder)}"
        for folder, inside in folders.items()
        for file in (root / folder).rglob("*")  # which does not go through links
        if file.is_file() and "__pycache__" not in file.parts
    }


def checkout(to: Path) -> Path:
    """A copy of this repository as git would make it: tracked and new files, links as links."""
    for name in sorted({*git("ls-files"), *git("ls-files", "--others", "--exclude-standard")}):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to


def build(where: Path, *targets: str) -> list[Path]:
    """Build with the declared backend, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", *(f"--target={target}" for target in targets)]
    run = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted((where / "dist").iterdir())


def without_path() -> dict[str, str]:
    """The environment without a path to this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@functools.cache
def _built(folder: Path) -> tuple[Path, Path, Path]:
    wheel, sdist = sorted(
        build(checkout(folder / "checkout"), "sdist", "wheel"), key=lambda file: file.suffix != ".whl"
    )
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    [second] = build(unpacked, "wheel")
    return wheel, sdist, second


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The wheel, the source distribution, and the wheel made from that."""
    pytest.importorskip("hatchling")
    return _built(tmp_path_factory.mktemp("build"))


def files_in(wheel: Path) -> set[str]:
    """What a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path, name: str) -> str:
    """One of a wheel's metadata files."""
    with zipfile.ZipFile(wheel) as archive:
        [found] = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
        return archive.read(found).decode()


def core_metadata(wheel: Path) -> email.message.Message:
    """A wheel's METADATA."""
    return email.parser.Parser().parsestr(metadata(wheel, "METADATA"))


# ---- Links ----


@pytest.mark.parametrize("link", LINKS)
def test_link_is_a_link(link: str) -> None:
    """In the tree and for git each is a link to its folder at the top, not a copy and not a text file."""
    assert (ROOT / link).is_symlink(), f"{link} is no link; restore it: ln -s {LINKS[link]} {link}"
    assert (ROOT / link).readlink() == Path(LINKS[link])
    assert (ROOT / link / "__init__.py").is_file()
    [entry] = git("ls-files", "--stage", "--", link)
    assert entry.split()[0] == "120000"


def test_no_other_links() -> None:
    """Nothing else in the repository depends on links."""
    linked = {line.split("\t")[1] for line in git("ls-files", "--stage") if line.startswith("120000")}
    assert linked == set(LINKS)


def test_nothing_importable_is_left_out_by_git() -> None:
    """No file of the package is ignored: what is tested is what a clone has."""
    ignored = git("ls-files", "--others", "--ignored", "--exclude-standard", "--", "omni_fastpath", "patches", "hooks")
    assert [name for name in ignored if "__pycache__" not in name] == []


# ---- What is built ----


def test_wheel_has_every_module(built: tuple[Path, Path, Path]) -> None:
    """The wheel holds the files of the checkout, each once, under the names that they are imported by."""
    assert files_in(built[0]) == modules_here()


def test_wheel_from_the_sdist_is_the_wheel(built: tuple[Path, Path, Path]) -> None:
    """A wheel built from the source distribution, as pip does where only that is there, has the same files."""
    wheel, _, second = built
    assert files_in(second) == files_in(wheel)
    assert metadata(second, "METADATA") == metadata(wheel, "METADATA")


def test_nothing_leaks_to_the_top(built: tuple[Path, Path, Path]) -> None:
    """Only the package is importable: no top-level patches, hooks, tests, benchmarks or scripts, no path file."""
    for wheel in (built[0], built[2]):
        assert {name.split("/")[0] for name in files_in(wheel)} == {"omni_fastpath"}
        assert not any("__pycache__" in name or name.endswith((".pth", ".pyc")) for name in files_in(wheel))


def test_installed_wheel_works(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Unpacked elsewhere it imports its patches and hooks from there, and the folders' own names stay unknown."""
    with zipfile.ZipFile(built[2]) as archive:
        archive.extractall(tmp_path)  # noqa: S202 - our own wheel
    script = f"""
import importlib.util, sys
sys.path[:0] = [{str(tmp_path)!r}]
import omni_fastpath.bootstrap, omni_fastpath.hooks
from omni_fastpath.patches import PATCHES
assert omni_fastpath.__file__.startswith({str(tmp_path)!r}), omni_fastpath.__file__
assert [m for m in ("patches", "hooks") if importlib.util.find_spec(m)] == []
print(*(patch.name for patch in PATCHES))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=without_path(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    from omni_fastpath.patches import PATCHES

    assert run.stdout.split() == [patch.name for patch in PATCHES]


def test_installed_here_leaks_nothing_to_the_top(tmp_path: Path) -> None:
    """However it is installed here, editable too, the folders at the top are not importable by their own names."""
    script = """
import importlib.util
found = [importlib.util.find_spec(name) for name in ("patches", "hooks", "benchmarks")]
print([each.origin for each in found if each is not None and "%s" in str(each.origin)])
"""
    run = subprocess.run(
        [sys.executable, "-c", script % ROOT],
        cwd=tmp_path,
        env=without_path(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"


# ---- Metadata ----


def test_install_changes_no_serving_package(built: tuple[Path, Path, Path]) -> None:
    """Without an extra nothing of vLLM or torch is required; the extra pins what was tested."""
    from omni_fastpath.patches import PATCHES

    requirements = core_metadata(built[0]).get_all("Requires-Dist") or []
    plain = {re.split(r"[^A-Za-z0-9_-]", each)[0].lower() for each in requirements if "extra ==" not in each}
    assert plain
    assert not {name for name in plain if name.startswith(("vllm", "torch", "transformers", "numpy", "nvidia"))}
    [extra] = [each for each in requirements if "extra == 'vllm-omni'" in each]
    release = re.search(r"vllm-omni==([0-9.]+)", extra)
    assert release is not None
    assert all(release[1] in patch.releases for patch in PATCHES)


def test_both_loaders_find_the_plugin(built: tuple[Path, Path, Path]) -> None:
    """The registration stands in vLLM's group, which every process loads, and in vLLM-Omni's; the command is there."""
    points = ConfigParser()
    points.read_string(metadata(built[0], "entry_points.txt"))
    assert points["vllm.general_plugins"]["omni_fastpath"] == ENTRY_POINT
    assert points["vllm_omni.general_plugins"]["omni_fastpath"] == ENTRY_POINT
    assert points["console_scripts"]["omni-fastpath"] == "omni_fastpath.tools.cli:main"


def test_types_and_licence_are_shipped(built: tuple[Path, Path, Path]) -> None:
    """The marker for type checkers and the licence text are in the wheel."""
    assert "omni_fastpath/py.typed" in files_in(built[0])
    assert core_metadata(built[0])["License-Expression"] == "Apache-2.0"
    assert "Apache License" in metadata(built[0], "licenses/LICENSE")


def test_an_install_moves_nothing_that_works(built: tuple[Path, Path, Path]) -> None:
    """Every dependency has a floor, and what opentelemetry and langchain pin is above it."""
    from packaging.requirements import Requirement

    requirements = core_metadata(built[0]).get_all("Requires-Dist") or []
    ours = {each.name: each.specifier for each in map(Requirement, requirements) if each.marker is None}
    assert all(any(clause.operator == ">=" for clause in specifier) for specifier in ours.values())
    assert ours["wrapt"].contains("1.14.1")
    assert ours["packaging"].contains("23.2")


def _set_up(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a copy's set-up where pip finds no package, so that it ends after it has made .venv."""
    pip = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
    return subprocess.run(
        ["make", "setup"],
        cwd=folder,
        env={**kept, **pip, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A copy of this repository without a .venv."""
    return checkout(tmp_path / "checkout")


def test_set_up_mends_a_venv_without_pip(fresh: Path) -> None:
    """One that was interrupted, or made by another tool, gets pip and is gone on with."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=fresh, check=True)
    assert "there is no pip in .venv" in _set_up(fresh, PYTHON=sys.executable).stdout
    subprocess.run([".venv/bin/python", "-m", "pip", "--version"], cwd=fresh, check=True, capture_output=True)
