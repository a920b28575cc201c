"""Output whose reader leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from omni_fastpath.tools.ab.streams import outliving


def test_a_reader_that_has_left_is_no_error() -> None:
    """Not by rich either, which would end the program; nor is what was buffered an error when the stream is closed."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        os.close(read)
        said = outliving(stream)
        print("first", file=said, flush=True)
        Console(file=said).print("second")
        assert said.isatty() is False


def test_neither_is_a_terminal_that_was_closed() -> None:
    """To which writing is an input/output error."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        os.close(master)
        said = outliving(stream)
        print("first", file=said, flush=True)
        print("second", file=said, flush=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_is_one() -> None:
    """What somebody wants to read cannot be written: that is said."""
    stream = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 - closing it fails too
    with pytest.raises(OSError, match="No space left"):
        print("first", file=outliving(stream), flush=True)
    with pytest.raises(OSError, match="No space left"):
        stream.close()
