"""The pages say what is: keys and releases as a command prints them, a row of each patch, names, blocks and links."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from omni_fastpath import config
from omni_fastpath.config import Block
from omni_fastpath.declare import State
from omni_fastpath.patches import PATCHES

ROOT = Path(__file__).parents[1]
README, CONFIGURATION, OPERATIONS = ROOT / "README.md", ROOT / "docs/configuration.md", ROOT / "docs/operations.md"
SOURCES = ("omni_fastpath", "tests", "benchmarks", "scripts")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.yaml"), ROOT / "benchmarks/RESULTS.md"]


def _rows(page: Path) -> dict[str, str]:
    """The rows of its tables that begin with a name in code."""
    text = page.read_text(encoding="utf-8")
    return {found[1]: found[0] for found in re.finditer(r"^\| `([a-z_]+)` \|.*$", text, re.MULTILINE)}


@pytest.mark.parametrize(("page", "table"), [(CONFIGURATION, "keys"), (OPERATIONS, "matrix")])
def test_a_table_is_what_the_script_writes(page: Path, table: str) -> None:
    """``scripts/pages.py`` would not change the page."""
    (found,) = re.findall(rf"<!-- {table} -->\n(.*?)\n<!-- /{table} -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found == runpy.run_path(str(ROOT / "scripts/pages.py"))[table](PATCHES)


def test_the_readme_has_a_row_of_each_patch() -> None:
    """Each patch has a row, and exactly the opt-in patches are called opt-in."""
    rows = _rows(README)
    assert [patch.name for patch in PATCHES if ("opt-in" in rows[patch.name]) is patch.default_on] == []


def test_states_and_metrics_are_explained() -> None:
    """The operations page has a row for each state and names each metric."""
    assert {state.value for state in State} <= _rows(OPERATIONS).keys()
    text = OPERATIONS.read_text(encoding="utf-8")
    assert [metric.name for patch in PATCHES for metric in patch.metrics if metric.name not in text] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Variables are known, YAML blocks are valid, and links and files exist."""
    text = page.read_text(encoding="utf-8")
    named = {name.rstrip("_") for name in re.findall(r"\bOMNI_FASTPATH\w*", text)}
    assert {name for name in named - {*config.variables(PATCHES)} if config.set_variables({name: ""}, PATCHES)} == set()
    blocks = [text] if page.suffix == ".yaml" else re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    for read in (document for block in blocks for document in yaml.safe_load_all(block)):
        for file in (read, *map(yaml.safe_load, read["data"].values() if read.get("kind") == "ConfigMap" else ())):
            if config.KEY in file:
                config.resolve(Block(page, file[config.KEY]), {}, PATCHES)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    here = {file.name for folder in SOURCES for file in (ROOT / folder).rglob("*.py")}
    assert {name for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text) if name not in here} == set()


def test_the_hosted_workflow_covers_each_python() -> None:
    """It runs the unit tests on every Python that pyproject.toml allows."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [(least, below)] = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)
    unit = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["unit"]
    assert unit["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(least), int(below))]
