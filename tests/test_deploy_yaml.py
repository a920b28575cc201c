"""Reading a deploy YAML as upstream reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from omni_fastpath.config import ConfigError, block_of, read, resolve, resolve_file
from omni_fastpath.patches import PATCHES


def write(path: Path, content: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.upstream
def test_the_first_block_along_the_chain_counts_as_upstream_has_it(tmp_path: Path) -> None:
    """``base_config`` is absolute or relative to its file. The first block from the top replaces the others."""
    write(tmp_path / "base" / "a.yaml", "fastpath: {save_queue_cap: true}\n")
    write(tmp_path / "base" / "b.yaml", "base_config: a.yaml\nstages: [{stage_id: 0}]\n")
    write(tmp_path / "c.yaml", "base_config: base/b.yaml\nfastpath: {budgeted_drain: {max_items: 3}}\n")
    write(tmp_path / "d.yaml", f"base_config: {tmp_path / 'c.yaml'}\n")
    write(tmp_path / "e.yaml", "base_config: d.yaml\nfastpath:\n")
    said = {"base/b": {"save_queue_cap": True}, "d": {"budgeted_drain": {"max_items": 3}}, "e": None}
    for name, value in said.items():
        path = tmp_path / f"{name}.yaml"
        assert read(path).value == value
        assert resolve(read(path), {}, PATCHES).source == str(path)


def test_master_off_opens_no_file(tmp_path: Path) -> None:
    """Under ``OMNI_FASTPATH=0`` an unreadable YAML does not stop a server."""
    assert not resolve_file(tmp_path / "missing.yaml", {"OMNI_FASTPATH": "0"}, PATCHES).enabled


@pytest.mark.upstream
@pytest.mark.parametrize(
    "content",
    ["a: [", "fastpath: 1\nfastpath: 0", "- a", "base_config: 3", "base_config: gone.yaml", "base_config: deploy.yaml"],
)
def test_unreadable_files_are_refused(tmp_path: Path, content: str) -> None:
    """A file that upstream cannot load is refused by name, and so are duplicate keys and a file that is its base."""
    path = write(tmp_path / "deploy.yaml", content)
    with pytest.raises(ConfigError, match=r"deploy\.yaml: vLLM-Omni refuses it: "):
        read(path)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("stages: [{stage_id: 0}, {stage_id: 1, fastpath: true}]\n", "stages[1].fastpath"),
        ("platforms: {npu: {fastpath: {pump: true}}}\n", "platforms.npu.fastpath"),
        ("fastpath: true\nplatforms: {cuda: {stages: [{fastpath: }]}}\n", "platforms.cuda.stages[0].fastpath"),
    ],
)
def test_a_key_in_a_wrong_place_is_refused(tmp_path: Path, content: str, place: str) -> None:
    """The key below the top level, which nobody would read, is refused by its place."""
    top = tmp_path / "top.yaml"
    block = block_of(top, yaml.safe_load(content))
    with pytest.raises(ConfigError, match=re.escape(f"{place} in {top}: fastpath must be a top-level key")):
        resolve(block, {}, PATCHES)
    assert not resolve(block, {"OMNI_FASTPATH": "0"}, PATCHES).enabled
