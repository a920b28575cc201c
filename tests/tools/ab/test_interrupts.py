"""Which signals end a measurement."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from omni_fastpath.tools.ab.interrupts import Interrupted, Interrupts


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What pytest has for a closed terminal."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_it() -> None:
    """As Ctrl-C does: at once in a part without steps, else at the next check."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupts = Interrupts()
    with interrupts.caught():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Interrupted):
            interrupts.check()
        interrupts.count = 0
        with pytest.raises(Interrupted), interrupts.at_once():
            signal.raise_signal(signal.SIGHUP)


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    """Where SIGHUP was ignored, it is."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts().caught():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
