"""Which process: exact to the tick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from omni_fastpath import process_role


def test_a_name_may_hold_anything(tmp_path: Path) -> None:
    """A program called ``) Z 1 (`` is read as the living process that it is."""
    odd = tmp_path / ") Z 1 ("
    odd.symlink_to(sys.executable)
    with subprocess.Popen([odd, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert process_role.started(child.pid) is not None
        assert process_role.ancestors(child.pid)[0] == os.getpid()
        child.communicate(b"\n")
    assert process_role.started(child.pid) is None
    assert process_role.ancestors(child.pid) == []


def test_a_process_that_waits_to_be_reaped_has_ended() -> None:
    """A zombie has its id still, and is no process."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_role.started(child.pid) is None
