"""The short form of `faults`: a put that raises, and a stage process that is killed, on one pair of servers."""

from __future__ import annotations

import sys

import pytest

from tests.fakes.processes import process

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(1500)]


def test_what_fails_fails_as_on_stock() -> None:
    """The same requests fail with the same message, all others and later ones are answered, and none is lost."""
    command = (sys.executable, "-W", "ignore", "-m", "benchmarks.trust.faults", "put-raises", "killed")
    done = process(*command)
    assert done.returncode == 0, done.stdout + done.stderr
