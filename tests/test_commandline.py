"""The command line as vLLM reads it, compared with vLLM's own parser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.commandline import is_headless, is_serve, value

SERVE = ["serve", "model", "--omni"]


def given(folder: Path, content: str | None) -> list[str]:
    """``--config`` and a file with this content."""
    file = folder / "config.yaml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    return ["--config", str(file)]


FILES = [
    ("headless: true\n", True),
    ("port: 1\nheadless: yes\nstage-id: 1\n", True),
    ("headles: true\n", True),
    ("headless: false\n", False),
    ("headless: []\n", False),
    ("no-headless: true\n", False),
    ("HEADLESS: true\n", False),
    ("port: 1\n", False),
    ("nested: {headless: true}\n", False),
]


@pytest.mark.parametrize(("content", "headless"), FILES)
def test_config_files(tmp_path: Path, content: str, headless: bool) -> None:
    """A key of the file is the option of its name."""
    assert is_headless([*SERVE, *given(tmp_path, content)]) is headless


@pytest.mark.upstream
@pytest.mark.parametrize(("content", "headless"), FILES)
def test_config_files_as_vllm_reads_them(tmp_path: Path, content: str, headless: bool) -> None:
    """VLLM's own parser says the same of every file that it takes."""
    import argparse

    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Refused(Exception):  # noqa: N818
        pass

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise Refused(message)

    parser = Parser()
    parser.add_argument("subcommand")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--omni", action="store_true")
    parser.add_argument("--headless", action="store_true")
    for name in ("--port", "--stage-id", "--host", "--hf-token"):
        parser.add_argument(name)
    try:
        namespace: argparse.Namespace = parser.parse_args([*SERVE, *given(tmp_path, content)])
    except Refused:
        return
    assert namespace.headless is headless


@pytest.mark.parametrize(
    ("arguments", "headless"),
    [
        ([*SERVE, "--headless"], True),
        ([*SERVE, "--headl"], True),
        ([*SERVE, "--hea"], True),
        ([*SERVE, "--help"], False),
        ([*SERVE, "--host", "x"], False),
        ([*SERVE, "--headless=true"], False),  # argparse refuses a value
        (SERVE, False),
        (["serve", "model", "--headless"], False),
        (["train", "--headless", "--config", "x.yaml"], False),
        ([*SERVE, "--config"], False),
        ([*SERVE, "--config", "gone.yaml"], False),
    ],
)
def test_arguments(arguments: list[str], headless: bool) -> None:
    """The flag, its unambiguous beginnings, and only beside ``--omni``."""
    assert is_headless(arguments) is headless


@pytest.mark.parametrize("content", [None, "a: [", "- headless\n", "", "\x00"])
def test_files_that_vllm_will_refuse(tmp_path: Path, content: str | None) -> None:
    """What cannot be read is left to vLLM."""
    assert not is_headless([*SERVE, *given(tmp_path, content)])


def test_a_pipe_is_left_to_vllm(tmp_path: Path) -> None:
    """What can be read only once is neither read nor waited for."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert not is_headless(["serve", "--omni", "--config", str(pipe)])


@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        (SERVE, True),
        (SERVE[:2], False),
        (["bench", "serve", "--omni"], False),
        (["--omni", "serve"], False),
        ([], False),
    ],
)
def test_serving_is_told_from_other_commands(arguments: list[str], served: bool) -> None:
    """The subcommand comes first, and ``--omni`` makes it ours."""
    assert is_serve(arguments) is served


@pytest.mark.parametrize(
    ("arguments", "found"),
    [([], None), (["--port"], None), (["--port", "1", "--port=2"], "2"), (["--port", "--host", "h"], None)],
)
def test_the_value_of_an_option(arguments: list[str], found: str | None) -> None:
    """The last one counts; of a process whose command line cannot be read there is none."""
    assert value(arguments, "--port") == found
