"""Reading a deploy YAML and the files that it builds on."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.config import ConfigError, resolve
from omni_fastpath.deployyaml import ABSENT, blocks_of, read_blocks
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools import overlay


def write(path: Path, content: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_the_chain_is_read_base_first(tmp_path: Path) -> None:
    """``base_config`` is relative to the file that names it; absent and null blocks are told apart."""
    write(tmp_path / "base" / "a.yaml", "stages: []\nfastpath: true\n")
    write(tmp_path / "base" / "b.yaml", "base_config: a.yaml\n")
    top = write(tmp_path / "c.yaml", "base_config: base/b.yaml\nfastpath:\n")
    blocks = read_blocks(top)
    assert [(block.path.name, block.value) for block in blocks] == [
        ("a.yaml", True),
        ("b.yaml", ABSENT),
        ("c.yaml", None),
    ]
    assert resolve(blocks, {}, PATCHES).source == str(top)


def test_an_absolute_base_is_taken_as_it_is(tmp_path: Path) -> None:
    """An overlay may name its base by an absolute path."""
    base = write(tmp_path / "x" / "a.yaml", "fastpath: true\n")
    top = write(tmp_path / "c.yaml", f"base_config: {base}\n")
    assert [block.value for block in read_blocks(str(top))] == [True, ABSENT]


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_chain_that_comes_back_is_refused(tmp_path: Path, names: list[str]) -> None:
    """Files that build on each other are refused with the whole chain, also by way of another spelling of a path."""
    for name, base in zip(names, [*names[1:], names[0]], strict=True):
        write(tmp_path / f"{name}.yaml", f"base_config: ../{tmp_path.name}/{base}.yaml\n")
    with pytest.raises(ConfigError, match=r"comes back to a file: .*a\.yaml.* -> .*a\.yaml"):
        read_blocks(tmp_path / ".." / tmp_path.name / "a.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"deploy\.yaml: cannot be read"),
        ("a: [", r"deploy\.yaml: cannot be read"),
        ("fastpath: true\nfastpath: false\n", "found duplicate key fastpath"),
        ("fastpath: {pump: {items: 1, items: 2}}\n", "found duplicate key items"),
        ("- fastpath\n", "a mapping at the top level"),
        ("base_config: 3\n", "base_config in .*found 3"),
        ("base_config: gone.yaml\n", r"gone\.yaml: cannot be read"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    """A file that upstream's loader would not take is refused by name, duplicate keys included."""
    path = tmp_path / "deploy.yaml"
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=message):
        read_blocks(path)


def test_interpolation_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    """What OmegaConf, which upstream reads with, cannot resolve is refused by the file's name."""
    pytest.importorskip("omegaconf")
    with pytest.raises(ConfigError, match=r"deploy\.yaml: cannot be read"):
        read_blocks(write(tmp_path / "deploy.yaml", "x: ${nowhere}\n"))


@pytest.mark.parametrize("content", ["", "# nothing\n", "stages: []\n"])
def test_a_file_without_a_block_is_absent(tmp_path: Path, content: str) -> None:
    """An empty file and one without the key have no block."""
    assert [block.value for block in read_blocks(write(tmp_path / "a.yaml", content))] == [ABSENT]


@pytest.mark.parametrize(
    "content",
    [
        "fastpath: yes\n",
        "fastpath: off\n",
        "fastpath: ~\n",
        "fastpath: {valve: {floor: 1e-1}}\n",
        "fastpath: {valve: {floor: 1.5E+3}}\n",
        "fastpath: {valve: {items: 1_0, size: 256MiB}}\n",
        "fastpath: {valve: {order: 2026-01-01}}\n",
        "defaults: &x {items: 3}\nfastpath: {valve: {<<: *x}}\n",
        "n: 3\nfastpath: {valve: {items: '${n}'}}\n",
    ],
)
def test_yaml_is_read_as_upstream_reads_it(tmp_path: Path, content: str) -> None:
    """Words, numbers, dates, merges and interpolation come out as from OmegaConf, which upstream uses."""
    omega = pytest.importorskip("omegaconf").OmegaConf
    path = write(tmp_path / "a.yaml", content)
    expected = omega.to_container(omega.load(path), resolve=True)["fastpath"]
    value = read_blocks(path)[0].value
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("stages: [{stage_id: 0}, {stage_id: 1, fastpath: true}]\n", r"stages\[1\]\.fastpath"),
        ("stages: [{stage_id: 0, fastpath: null}]\n", r"stages\[0\]\.fastpath"),
        ("stages: [{stage_id: 0, engine_args: {fastpath: {}}}]\n", r"stages\[0\]\.engine_args\.fastpath"),
        ("stages: [{stage_id: 0, engine_extras: {fastpath: {}}}]\n", r"stages\[0\]\.engine_extras\.fastpath"),
        ("platforms: {cuda: {stages: [{fastpath: 1}]}}\n", r"platforms\.cuda\.stages\[0\]\.fastpath"),
        ("platforms: {cuda: {fastpath: 1}}\n", r"platforms\.cuda\.fastpath"),
    ],
)
def test_a_block_inside_a_stage_is_warned_of(tmp_path: Path, content: str, where: str) -> None:
    """The block is top-level. Somewhere else it is not read, and whether it may stand there is upstream's to say."""
    [block] = read_blocks(write(tmp_path / "a.yaml", content))
    [warning] = block.warnings
    assert block.value is ABSENT
    assert re.search(f"{where} is not read .*top level", warning)


@pytest.mark.parametrize("content", [{}, {"stages": [{"stage_id": 0}, {"stage_id": 1}], "fast_path": True}])
def test_what_upstream_read_without_the_key_is_not_opened(tmp_path: Path, content: dict[str, Any]) -> None:
    """Where upstream's dictionary has no block no file of the chain has one: stages and look-alikes come from there."""
    [block] = blocks_of(tmp_path / "not there.yaml", content)
    assert block.value is ABSENT
    assert (block.stages, len(block.warnings)) == (frozenset({0, 1} if content else ()), int(bool(content)))


@pytest.mark.parametrize(
    "content", ["stages: 3\n", "stages: [3, null]\n", "platforms: [1]\n", "platforms: {cuda: null}\n"]
)
def test_upstreams_own_mistakes_are_left_to_upstream(tmp_path: Path, content: str) -> None:
    """Shapes that only upstream can judge pass here."""
    assert len(read_blocks(write(tmp_path / "a.yaml", content))) == 1


@pytest.mark.parametrize(
    "key", ["fast_path", "fastpth", "Fastpath", "fast-path", "FASTPATH", "fatspath", "omni_fastpath"]
)
def test_lookalikes_warn(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt top-level key, which upstream ignores without a word, is warned of and still not taken."""
    caplog.set_level(logging.WARNING, logger="vllm.omni_fastpath")
    [block] = read_blocks(write(tmp_path / "a.yaml", f"{key}: true\n"))
    assert block.value is ABSENT
    assert len(block.warnings) == 1
    assert repr(key) in block.warnings[0]


@pytest.mark.upstream
def test_the_bundled_yamls_read_without_a_warning() -> None:
    """No key of a deploy YAML in vLLM-Omni is taken for ours, and every chain of theirs can be read."""
    if not overlay.bundled():
        pytest.skip("vllm-omni is not installed")
    for path in overlay.bundled().values():
        blocks = read_blocks(path)
        assert all(block.value is ABSENT and not block.warnings for block in blocks)
