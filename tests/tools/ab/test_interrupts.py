"""Which signals end a measurement."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from omni_fastpath.tools.ab.errors import Interrupted
from omni_fastpath.tools.ab.interrupts import Interrupts


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What pytest has for a closed terminal."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_it() -> None:
    """As Ctrl-C does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(Interrupted), Interrupts().caught():
        signal.raise_signal(signal.SIGHUP)


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    """Where SIGHUP was ignored, it is."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts().caught():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
