"""What a run repeats of a program's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_fastpath.tools.ab import serving


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
