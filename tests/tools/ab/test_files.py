"""Starts of files are pooled where they are of one arm, each once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.tools.ab import commands, files, report
from omni_fastpath.tools.ab.capture import chat_request
from omni_fastpath.tools.ab.files import Series, Start


def _written(folder: Path, at: float, *, load: str = "8", b: str = "1", **changes: Any) -> list[Path]:
    """The files of a series of two starts."""
    paths = []
    for place, (arm, variables) in enumerate((("A", {}), ("B", {"X": b})), 1):
        path = folder / "starts" / f"{place:02}-{arm}.json"
        bench = ["vllm", "bench", "--port", "{port}", "--num-prompts", load]
        said = {"variables": variables, "about": {"at": at + place}, "bench": bench, "serve": ["vllm", "serve"]}
        Start.model_validate(
            {"arm": arm, "place": place, "measured": {"median_ttft_ms": 1.0}, **said, **changes}
        ).write(path)
        paths.append(path)
    return paths


def _read(*paths: Path) -> Series:
    return files.series(paths)


def test_starts_of_two_series_of_the_same_arms_are_pooled(tmp_path: Path) -> None:
    """In the order of their times."""
    found = _read(*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9))
    assert [start.arm for start in found.starts] == ["A", "B", "A", "B"]


def test_starts_that_were_asked_different_things_are_refused(tmp_path: Path) -> None:
    """Their answers differ whatever the arms do."""
    one = _written(tmp_path / "x", 1, questions="1")
    with pytest.raises(ConfigError, match="starts that were sent different fixed requests"):
        _read(*one, *_written(tmp_path / "z", 19, questions="2"))


def test_the_model_s_name_is_no_difference_of_what_was_asked() -> None:
    """Two servers may call one model by two names; another prompt is another question."""
    one, other, third = (
        commands.digest([chat_request(prompt, model=model)]) for prompt, model in (("a", "m"), ("a", "n"), ("b", "m"))
    )
    assert one == other != third


def test_two_arms_of_one_name_are_refused(tmp_path: Path) -> None:
    """Every series has an A and a B."""
    both = [*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9, b="2")]
    with pytest.raises(ConfigError, match="two arms of one name"):
        _read(*both)


def test_another_load_is_an_alarm(tmp_path: Path) -> None:
    """It may be meant, and must not be overlooked; so is another server command."""
    both = [*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9, load="16", serve=["vllm", "serve", "other"])]
    assert "The starts' commands differ" in report.alarms(report.judge(_read(*both)))


def test_a_start_counts_once(tmp_path: Path) -> None:
    """Named twice, or copied."""
    paths = _written(tmp_path / "x", 1)
    shutil.copy(paths[1], tmp_path / "copy.json")
    for again in (paths[0], tmp_path / "copy.json"):
        with pytest.raises(ConfigError, match="the same start twice"):
            _read(*paths, again)
