"""The handoff from a parent to the processes it spawns, with real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import handoff
from omni_fastpath.config import Block, Resolved, resolve
from omni_fastpath.declare import Patch, Process

ROOT = Path(__file__).resolve().parent.parent
PATCH = Patch(
    name="drum",
    summary="",
    processes=frozenset({Process.STAGE}),
    rows=(),
    docs="",
    counters=(),
)
RESOLVED = resolve([Block(Path("deploy.yaml"), {"drum": True})], {}, (PATCH,))

RECEIVE = """
import sys
from omni_fastpath.declare import Patch, Process
from omni_fastpath.handoff import receive
patch = Patch(name="drum", summary="", processes=frozenset({Process.STAGE}), docs="", rows=(), counters=())
received = receive((patch,))
print("nothing" if received is None else ",".join(received.enabled) + " " + str(received.source))
"""

EXPORT = """
import sys, os
from pathlib import Path
from omni_fastpath.config import Block, resolve
from omni_fastpath.declare import Patch, Process
from omni_fastpath.handoff import export
patch = Patch(name="drum", summary="", processes=frozenset({Process.STAGE}), docs="", rows=(), counters=())
export(resolve([Block(Path("deploy.yaml"), {"drum": True})], {}, (patch,)))
print(os.environ["_OMNI_FASTPATH_HANDOFF"], flush=True)
"""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with our package importable and these variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def received(script: str, variables: dict[str, str]) -> str:
    """The last line that a child running ``script`` prints."""
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment(**variables), capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()[-1]


def exported() -> dict[str, str]:
    """What this process would put into its environment."""
    variables: dict[str, str] = {}
    handoff.export(RESOLVED, variables)
    assert list(variables) == ["_OMNI_FASTPATH_HANDOFF"]
    return variables


def test_a_child_receives() -> None:
    """A spawned process takes what its parent exported."""
    assert received(RECEIVE, exported()) == "drum deploy.yaml"


def test_a_grandchild_receives() -> None:
    """A process between does not matter while the exporter lives and is an ancestor."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RECEIVE!r}], check=True)"
    assert received(script, exported()) == "drum deploy.yaml"


def test_the_exporter_itself_does_not_receive() -> None:
    """A second registration in the parent is not mistaken for a stage."""
    assert handoff.receive((PATCH,), exported()) is None


def test_a_dead_exporters_variable_is_stale() -> None:
    """What a process left behind that has ended is ignored."""
    stale = received(EXPORT, {})
    assert received(RECEIVE, {handoff.VARIABLE: stale}) == "nothing"


def test_a_live_strangers_variable_is_ignored() -> None:
    """A live process that is no ancestor cannot hand over, not even a sibling."""
    script = f"{EXPORT}\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        variable = stranger.stdout.readline().strip()
        assert json.loads(variable)["pid"] == stranger.pid
        assert received(RECEIVE, {handoff.VARIABLE: variable}) == "nothing"
        stranger.communicate()


@pytest.mark.parametrize(
    "change",
    [
        {"started": 1},
        {"pid": 2**22 + 1},
        {"schema": 2},
        {"more": 1},
    ],
)
def test_a_variable_that_does_not_fit_is_ignored(change: dict[str, Any]) -> None:
    """The right id with another beginning is a reused one; another schema is another version; neither is taken."""
    fields = {**json.loads(exported()[handoff.VARIABLE]), **change}
    assert received(RECEIVE, {handoff.VARIABLE: json.dumps(fields)}) == "nothing"


@pytest.mark.parametrize("content", ["{}", "", '{"enabled": {"flute": {}}}'])
def test_what_a_live_parent_says_and_nobody_understands_is_an_error(content: str) -> None:
    """A package that was exchanged under a running server must not leave its new stages stock in silence."""
    fields = {**json.loads(exported()[handoff.VARIABLE]), "resolved": content}
    script = f"from omni_fastpath.config import ConfigError\ntry:{RECEIVE.replace(chr(10), chr(10) + '    ')}\n"
    script += "except ConfigError as error: print('refused:', error)"
    assert received(script, {handoff.VARIABLE: json.dumps(fields)}) != "nothing"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(**{handoff.VARIABLE: json.dumps(fields)}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("refused: found no resolved configuration")


def test_a_path_that_is_no_text_reaches_the_stages() -> None:
    """A deploy YAML whose name is no Unicode switches its stages on like any other."""
    path = Path(os.fsdecode(b"caf\xe9.yaml"))
    variables: dict[str, str] = {}
    handoff.export(resolve([Block(path, {"drum": True})], {}, (PATCH,)), variables)
    assert variables[handoff.VARIABLE].isascii()
    assert received(RECEIVE, variables) == "drum caf?.yaml"


def test_nothing_is_asked_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ancestors are found without psutil, whose ``boot_time`` raises where ``/proc/stat`` is not the machine's."""
    script = f"import psutil\npsutil.Process = psutil.boot_time = None\n{RECEIVE}"
    assert received(script, exported()) == "drum deploy.yaml"


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}"])
def test_garbage_is_ignored(text: str) -> None:
    """What is no handoff at all is nobody's configuration."""
    assert handoff.receive((PATCH,), {handoff.VARIABLE: text}) is None


def test_nothing_without_the_variable() -> None:
    """Without the variable nothing is received."""
    assert handoff.receive((PATCH,), {}) is None


def test_export_replaces_and_is_complete() -> None:
    """The last export counts, and it carries the whole result."""
    variables = exported()
    nothing = resolve([], {}, (PATCH,))
    handoff.export(nothing, variables)
    carried = json.loads(variables[handoff.VARIABLE])["resolved"]
    assert Resolved.from_json(carried, (PATCH,)) == nothing
