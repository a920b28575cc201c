"""What pages name is there: keys, releases, variables, YAML blocks, commands, files and links."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from omni_fastpath import config
from omni_fastpath.config import Block
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import cli

ROOT = Path(__file__).parents[1]
CONFIGURATION, OPERATIONS = ROOT / "docs/configuration.md", ROOT / "docs/operations.md"
SOURCES = ("omni_fastpath", "tests", "benchmarks", "scripts")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.yaml"), ROOT / "benchmarks/RESULTS.md"]


@pytest.mark.parametrize(("page", "table"), [(CONFIGURATION, "keys"), (OPERATIONS, "matrix")])
def test_a_table_is_what_the_script_writes(page: Path, table: str) -> None:
    """``scripts/pages.py`` would not change the page."""
    (found,) = re.findall(rf"<!-- {table} -->\n(.*?)\n<!-- /{table} -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found == runpy.run_path(str(ROOT / "scripts/pages.py"))[table](PATCHES)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Variables and commands are known, YAML blocks are valid, and links and files exist."""
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
    for command in set(re.findall(r"`omni-fastpath ([a-z]+)", text)):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0, command
    modules = [ROOT / name.replace(".", "/") for name in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", text)]
    assert [each for each in modules if not (each.with_suffix(".py").exists() or (each / "__main__.py").exists())] == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)} <= {*targets}
