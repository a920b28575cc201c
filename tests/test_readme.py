"""The README says what the options are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_fastpath import config
from omni_fastpath.declare import State
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.tables import matrix
from omni_fastpath.variables import MASTER, ON_UNSUPPORTED

README = Path(__file__).parents[1] / "README.md"


def _block() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(fastpath:.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    block: dict[str, Any] = yaml.safe_load(text)["fastpath"]
    return block


def test_the_block_has_every_patch_and_nothing_else() -> None:
    """Each patch has its key in the YAML block of the README."""
    assert _block().keys() - {"on_unsupported"} == {patch.name for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_block_shows_every_value_with_its_default(patch: Any) -> None:
    """The README's values are the defaults in force; a patch without values is shown as a switch."""
    shown = _block()[patch.name]
    defaults = patch.options().model_dump()
    if not defaults:
        assert shown is True
        return
    assert list(shown) == list(patch.options.model_fields)
    assert patch.options.model_validate(shown, strict=False).model_dump() == defaults


def test_the_block_says_which_patches_are_opt_in() -> None:
    """A patch that is not in the default set says so beside its key, and no other does."""
    lines = README.read_text(encoding="utf-8").splitlines()
    for patch in PATCHES:
        (line,) = [each for each in lines if each.startswith(f"  {patch.name}:")]
        assert ("opt-in" in line) == (not patch.default_on), line


def test_every_variable_that_is_named_exists() -> None:
    """No variable stands in the README that is neither known nor, as Kubernetes' names are, nobody's."""
    named = set(re.findall(r"OMNI_FASTPATH[A-Z0-9_]*", README.read_text(encoding="utf-8")))
    known = {*config.variables(PATCHES)}
    assert {name for name in named - known if config.said({name: ""}, PATCHES)} == set()
    assert {MASTER, ON_UNSUPPORTED} <= named


def test_every_state_and_patch_stands_in_its_table() -> None:
    """The tables of states and of patches have a row for each."""
    text = README.read_text(encoding="utf-8")
    for name in (*(state.value for state in State), *(patch.name for patch in PATCHES)):
        assert re.search(rf"^\| `{name}` \|", text, re.MULTILINE), name


def test_the_matrix_is_what_the_declarations_say() -> None:
    """Between its marks, where they are, stands what ``omni-fastpath explain --matrix`` prints."""
    for found in re.findall(r"<!-- matrix -->\n(.*?)\n<!-- /matrix -->", README.read_text(encoding="utf-8"), re.DOTALL):
        assert found.strip() == matrix(PATCHES)


def test_relative_links_lead_somewhere() -> None:
    """A file that the README links to is there."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
