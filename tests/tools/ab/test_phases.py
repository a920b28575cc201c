"""What a run prints of its phases, on a terminal and in a log."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from omni_fastpath.tools.ab import phases, serving


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, [5, 6, 65]), (False, [65])])
def test_what_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, shown: list[int]) -> None:
    """A line that is written over each second on a terminal, a line a minute in a log; nothing of it stays behind."""
    now = 0.0
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now))
    out = io.StringIO()
    said = phases.Phases(Console(file=out, force_terminal=is_terminal, width=40, _environ={}), 2)
    with said.phase("the client") as tell:
        for now in (0.5, 5.0, 5.5, 6.0, 65.0):
            tell(f"{now:g} of 70 |{'#' * 60}|")
    lines = [line for line in out.getvalue().replace("\r", "\n").replace("\x1b[2K", "").split("\n") if line]
    assert lines[0].endswith("... the client")
    assert lines[-1].endswith("done the client: 65.0 s; about 1.1 min left")
    assert [line.partition("]")[2].split()[0] for line in lines[1:-1]] == [f"{at:g}" for at in shown]
    assert out.getvalue().count("\n") == (2 if is_terminal else 3)
    assert not is_terminal or max(map(len, lines[1:-1])) <= 40


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("", ""),
        ("one\ntwo\n", "two"),
        ("start\n 10%|# |\r 20%|## |\r", "20%|## |"),
        ("x" * 5000 + "\nend", "end"),
        ("\x1b[1;32m10%\x1b[0m done\x1b[K\x07\x1b]0;mine", "10% done]0;mine"),
    ],
)
def test_what_a_program_said_last(tmp_path: Path, said: str, last: str) -> None:
    """A progress bar counts as a line; of a log that is not there it is nothing; a terminal obeys none of it."""
    log = tmp_path / "log"
    assert serving.last_line(log) == ""
    log.write_bytes(said.encode())
    assert serving.last_line(log) == last
