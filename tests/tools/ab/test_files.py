"""Starts of files are pooled where they are of one arm, each once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.config import ConfigError
from omni_fastpath.tools.ab import commands, files, report
from omni_fastpath.tools.ab.capture import chat_request
from omni_fastpath.tools.ab.files import Start


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


def test_starts_of_two_series_of_the_same_arms_are_pooled(tmp_path: Path) -> None:
    """Starts are ordered by their times."""
    found = files.series([*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9)])
    assert [start.arm for start in found.starts] == ["A", "B", "A", "B"]


def test_starts_that_were_asked_different_things_are_refused(tmp_path: Path) -> None:
    """Starts with different fixed requests are refused, because their answers differ anyway."""
    one = _written(tmp_path / "x", 1, questions="1")
    with pytest.raises(ConfigError, match="starts that were sent different fixed requests"):
        files.series([*one, *_written(tmp_path / "z", 19, questions="2")])


def test_the_model_s_name_is_no_difference_of_what_was_asked() -> None:
    """Requests that differ only in the model's name are equal."""
    one, other, third = (
        commands.digest([chat_request(prompt, model=model)]) for prompt, model in (("a", "m"), ("a", "n"), ("b", "m"))
    )
    assert one == other != third


def test_two_arms_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two series whose arms have the same name and different variables are refused."""
    both = [*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9, b="2")]
    with pytest.raises(ConfigError, match="two arms of one name"):
        files.series(both)


def test_another_load_is_an_alarm(tmp_path: Path) -> None:
    """Starts with another load or server command are compared with an alarm."""
    both = [*_written(tmp_path / "x", 1), *_written(tmp_path / "y", 9, load="16", serve=["vllm", "serve", "other"])]
    assert "The starts' commands differ" in report.alarms(report.judge(files.series(both)))


def test_a_start_counts_once(tmp_path: Path) -> None:
    """A start that is named twice, or copied, is refused."""
    paths = _written(tmp_path / "x", 1)
    shutil.copy(paths[1], tmp_path / "copy.json")
    for again in (paths[0], tmp_path / "copy.json"):
        with pytest.raises(ConfigError, match="the same start twice"):
            files.series([*paths, again])
