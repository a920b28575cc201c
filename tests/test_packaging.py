"""What is built is what is here: links, wheel, source distribution, and a wheel from that."""

from __future__ import annotations

import email.parser
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINT = "omni_fastpath.startup:register"


def build(where: Path, into: Path, *targets: str) -> list[Path]:
    """Build with the declared backend, without a network; wheels come first."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(into), *(f"--target={each}" for each in targets)]
    run = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted(into.iterdir(), key=lambda file: file.suffix != ".whl")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the wheel made from the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("build")
    wheel, sdist = build(ROOT, folder / "dist", "sdist", "wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    [second] = build(unpacked, folder / "second", "wheel")
    return wheel, second


def files_in(wheel: Path) -> set[str]:
    """What a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path, name: str) -> str:
    """One of a wheel's metadata files."""
    with zipfile.ZipFile(wheel) as archive:
        [found] = [each for each in archive.namelist() if each.endswith(f".dist-info/{name}")]
        return archive.read(found).decode()


# ---- Links ----


@pytest.mark.parametrize("link", ["patches", "hooks"])
def test_link_is_a_link(link: str) -> None:
    """The folders are in the package and the links at the top, because pip unpacks a zip archive's links as text."""
    assert (ROOT / link).readlink() == Path("omni_fastpath") / link
    assert not (ROOT / "omni_fastpath" / link).is_symlink()


# ---- What is built ----


def test_wheel_has_every_module(built: tuple[Path, Path]) -> None:
    """The wheel has each file of the checkout once, under its import name."""
    here = [file for file in (ROOT / "omni_fastpath").rglob("*") if file.is_file()]
    assert files_in(built[0]) == {str(each.relative_to(ROOT)) for each in here if "__pycache__" not in each.parts}


def test_wheel_from_a_zip_archive_is_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A wheel built from a zip archive, whose links pip unpacks as text files, has the same files."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (tmp_path / "archive" / name).parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / name
        content = str(source.readlink()).encode() if source.is_symlink() else source.read_bytes()
        (tmp_path / "archive" / name).write_bytes(content)
    [wheel] = build(tmp_path / "archive", tmp_path / "dist", "wheel")
    assert files_in(wheel) == files_in(built[0])


def test_wheel_from_the_sdist_is_the_wheel(built: tuple[Path, Path]) -> None:
    """A wheel built from the source distribution has the same files and metadata."""
    wheel, second = built
    assert files_in(second) == files_in(wheel)
    assert metadata(second, "METADATA") == metadata(wheel, "METADATA")


# ---- Metadata ----


def test_install_changes_no_serving_package(built: tuple[Path, Path]) -> None:
    """Requirements have floors and name nothing of vLLM or torch. What opentelemetry and langchain pin is allowed.

    The extra pins a release that was tested.
    """
    from packaging.requirements import Requirement

    from omni_fastpath.patches import PATCHES

    core = email.parser.Parser().parsestr(metadata(built[0], "METADATA"))
    requirements = [Requirement(each) for each in core.get_all("Requires-Dist") or []]
    plain = {each.name.lower(): each.specifier for each in requirements if each.marker is None}
    assert not [name for name in plain if name.startswith(("vllm", "torch", "transformers", "numpy", "nvidia"))]
    assert all(any(clause.operator == ">=" for clause in specifier) for specifier in plain.values())
    assert plain["wrapt"].contains("1.14.1")
    assert plain["packaging"].contains("23.2")
    [release] = [clause.version for each in requirements if each.name == "vllm-omni" for clause in each.specifier]
    assert all(release in patch.releases for patch in PATCHES)


def test_both_loaders_find_the_plugin(built: tuple[Path, Path]) -> None:
    """The plugin is in vLLM's and in vLLM-Omni's group of entry points, and the command exists."""
    points = ConfigParser()
    points.read_string(metadata(built[0], "entry_points.txt"))
    assert points["vllm.general_plugins"]["omni_fastpath"] == ENTRY_POINT
    assert points["vllm_omni.general_plugins"]["omni_fastpath"] == ENTRY_POINT
    assert points["console_scripts"]["omni-fastpath"] == "omni_fastpath.tools.cli:main"
