"""Standard output and standard error, whose reader may leave before a measurement ends."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any, TextIO, cast


def outliving(stream: TextIO) -> TextIO:
    """The stream, silent once nobody reads it: a ``tee`` that the same Ctrl-C ended, a terminal that was closed.

    Not by rich's ``Console.on_broken_pipe``, which old releases have not and which knows no terminals.
    """
    return cast("TextIO", _Outliving(stream))


class _Outliving:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write it, if somebody is there."""
        with self._whoever_reads():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written, if somebody is there."""
        with self._whoever_reads():
            self._stream.flush()

    @contextlib.contextmanager
    def _whoever_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # A closed terminal is still a device, though no longer a terminal.
            closed = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self._stream.fileno()).st_mode)
            if not closed and not isinstance(error, BrokenPipeError):
                raise  # such as a full disk, which is no reader that has left
            # Else Python tries what is left again at its exit, and makes 120 of the exit code.
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - its file number is what is wanted
                os.dup2(nowhere.fileno(), self._stream.fileno())
