"""Which engines of a process run, and what they asked for."""

from __future__ import annotations

import threading

import pytest

from omni_fastpath import engines
from omni_fastpath.declare import State
from omni_fastpath.install import install, is_installed, uninstall
from omni_fastpath.ledger import LEDGER
from tests.fakes.upstream import RUN, Upstream, patch, upstream

__all__ = ["upstream"]


class Engine:
    """A thread that starts as an engine and waits for its end."""

    def __init__(self, *patches: str) -> None:
        started = threading.Event()
        self._end = threading.Event()

        def run() -> None:
            engines.started(patches)
            started.set()
            self._end.wait()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        started.wait()

    def end(self) -> None:
        """Shut down."""
        self._end.set()
        self._thread.join()


def test_an_engine_uses_what_it_asked_for_while_it_runs() -> None:
    """Only that, and until its thread ends, also when another thread asked for the same."""
    first, second = Engine("pump", "valve"), Engine("pump")
    assert engines.user_of("pump") == "an engine that asked for it is running"
    assert engines.user_of("drum") is None
    first.end()
    assert engines.user_of("valve") is None
    assert engines.user_of("pump") is not None
    second.end()
    assert engines.user_of("pump") is None


def test_a_patch_that_an_engine_uses_stays(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be taken off and says why; when it is asked for again the reason is its own; at the end it goes."""
    used = patch("used", RUN)
    install(used)
    engine = Engine("used")
    reason = LEDGER.named("used").reason
    uninstall(used)
    assert is_installed("used")
    assert LEDGER.named("used").reason == f"{reason}; cannot be taken off: an engine that asked for it is running"
    engine.end()
    uninstall(used)
    assert LEDGER.named("used").state is State.OFF
