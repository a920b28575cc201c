"""Installations and servers broken on purpose, each seen as ``doctor`` sees it: that is found, and nothing else.

A server here is a process with a server's command line, environment, state file and children; the state file is what a
real one writes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_fastpath import __version__, entrypoint, install, statefile
from omni_fastpath.declare import Patch, Process
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import Release
from omni_fastpath.tools import status
from omni_fastpath.tools.findings import Finding, Severity, facts, judge, leftovers, rules
from tests.findings.made import fake_server

KNOWN = next(each for each in reversed(PATCHES[0].releases) if all(patch.row_on(each) for patch in PATCHES))
ON = next(patch for patch in PATCHES if patch.default_on and patch.counters[0].moves_with)
FIND = leftovers.find
STAGE_TITLE = "VLLM::StageEngineCoreProc_stage0_replica0"


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without trouble, whatever this test run's own is; nothing left, and processes settle at once."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    found = Release("vllm-omni", KNOWN)
    for module in (status, install):
        monkeypatch.setattr(module, "vllm_omni_release", lambda: found)
    points = (
        EntryPoint("omni_fastpath", "omni_fastpath.bootstrap:register", ""),
        EntryPoint("vllm_omni_register_models", "vllm_omni.engine.arg_utils:register", ""),
    )
    monkeypatch.setattr(entrypoint, "entry_points", lambda **_: points)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    monkeypatch.setattr(leftovers, "find", list)
    monkeypatch.setattr(rules, "SETTLED_S", 0.0)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The servers' XDG_RUNTIME_DIR, which is not the shell's."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    return folder


def record(patch: Patch, **changed: Any) -> dict[str, Any]:
    """A patch in a healthy state file."""
    on = "applied" if Process.SERVER in patch.processes else "not_applicable"
    return {
        "state": on if patch.default_on else "off",
        "reason": "",
        "origin": "default set (OMNI_FASTPATH=1)" if patch.default_on else "",
        "options": patch.options().model_dump() if patch.default_on else {},
        "counters": {counter.name: 1 for counter in patch.counters},
        **changed,
    }


def said(patches: Mapping[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """What a healthy server writes."""
    return {
        "role": "server",
        "process_name": "MainProcess",
        "omni_fastpath": __version__,
        "vllm": "vllm 0.30.0",
        "vllm_omni": KNOWN,
        "source": "environment",
        "port": None,
        "patches": {patch.name: record(patch) for patch in PATCHES} | dict(patches or {}),
        **changed,
    }


def found(**environ: str) -> list[Finding]:
    """What ``doctor`` finds in this shell."""
    return judge(status.look({"PATH": "/bin", **environ}, PATCHES, deep=True))


def of_server(pid: int, **environ: str) -> list[tuple[str, Severity]]:
    """What it finds of one server, but for what is only to be known."""
    mine = [each for each in found(**environ) if each.subject == f"server {pid}"]
    return [(each.id, each.severity) for each in mine if each.severity is not Severity.INFO]


def ids(findings: Sequence[Finding]) -> list[str]:
    """Of this installation, whatever else runs on the machine."""
    return [each.id for each in findings if each.subject == rules.HERE]


def test_a_healthy_shell_and_a_healthy_server(theirs: Path) -> None:
    """Nothing above info, whatever the shell's variables are."""
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    assert ids(found()) == []
    with fake_server("--port", "8091", environ=environ, said=said(port=8091)) as pid:
        assert of_server(pid) == []
        assert of_server(pid, OMNI_FASTPATHX="1", VLLM_PLUGINS="", PROMETHEUS_MULTIPROC_DIR="/nowhere") == []
    with fake_server(environ={"XDG_RUNTIME_DIR": str(theirs)}) as pid:  # stock
        assert of_server(pid) == []


FAILED = {ON.name: record(ON, state="failed", reason="an error of ours")}
ERROR, WARNING = Severity.ERROR, Severity.WARNING

SERVERS: dict[str, tuple[dict[str, str], dict[str, Any] | None, Severity]] = {
    "plugins-leave-us-out": ({"VLLM_PLUGINS": "vllm_omni_register_models"}, None, ERROR),
    "plugins-leave-upstream-out": ({"VLLM_PLUGINS": "omni_fastpath"}, said(), WARNING),
    "variable-unknown": ({f"{ON.env}__X": "1"}, said(), WARNING),
    "hook-plugin-unusable": ({}, said(hooks={"unusable": {"logbook": "no"}}), WARNING),
    "hook-plugin-switched-off": ({}, said(hooks={"switched_off": {"logbook": "no"}}), WARNING),
    "seam-wrapped": ({}, said(foreign_wrappers={ON.name: ["m:f: a FunctionWrapper of tracer"]}), WARNING),
    "patch-not-serving": ({}, said(FAILED), ERROR),
    "metrics-folder": ({"PROMETHEUS_MULTIPROC_DIR": "/nowhere"}, said(), WARNING),
}


@pytest.mark.parametrize("rule", SERVERS)
def test_a_broken_server(theirs: Path, rule: str) -> None:
    """By its own variables and its own state file, in its own folder."""
    variables, told, severity = SERVERS[rule]
    with fake_server(environ={"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1", **variables}, said=told) as pid:
        assert of_server(pid) == [(rule, severity)]


def test_a_server_that_says_nothing(theirs: Path) -> None:
    """It has a stage, so that its deploy YAML was read; without one it may be loading its model."""
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    with fake_server(environ=environ, children=[STAGE_TITLE]) as pid:
        assert of_server(pid) == [("server-silent", ERROR)]
    with fake_server(environ=environ) as pid:
        assert of_server(pid) == []


def test_a_server_of_another_version(theirs: Path) -> None:
    """Its state file has another schema: that is said, and not that it has none."""
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    with fake_server(environ=environ, said=said(), children=[STAGE_TITLE]) as pid:
        [file] = (theirs / "omni-fastpath").glob("*.json")
        file.write_text(file.read_text().replace('"schema": 2', '"schema": 99').replace('"schema":2', '"schema":99'))
        assert "99" in file.read_text()
        assert of_server(pid) == [("server-unreadable", WARNING)]


def test_a_stage_that_says_nothing(theirs: Path) -> None:
    """A child with a stage's title and no state file, below a server in which something is on."""
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    with fake_server(environ=environ, said=said(), children=[STAGE_TITLE]) as pid:
        assert of_server(pid) == [("process-silent", WARNING)]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"omni_fastpath": "0.0.9"}, [("versions-mixed", ERROR)]),
        ({"vllm": "vllm 0.29.0"}, [("versions-mixed", ERROR)]),
        ({"source": "/b.yaml"}, [("yaml-mixed", WARNING)]),
    ],
)
def test_processes_of_one_server_that_differ(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], expected: list[Any]
) -> None:
    """A stage's file says another version or another YAML than the server's."""
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    real = statefile.read_live

    def with_stage(at: Path | None = None) -> list[dict[str, Any]]:
        read = real(at)
        if at != theirs / "omni-fastpath":
            return read
        return [*read, *({**each, **changed, "pid": child, "role": "stage"} for each in read)]

    with fake_server(environ=environ, said=said(source="/a.yaml"), children=[STAGE_TITLE]) as pid:
        [child] = [each.pid for each in psutil.Process(pid).children()]
        monkeypatch.setattr(statefile, "read_live", with_stage)
        assert of_server(pid) == expected


def test_a_yaml_that_was_edited(theirs: Path, tmp_path: Path) -> None:
    """The server has what it read; the file is put back, and all is well."""
    path = tmp_path / "deploy.yaml"
    path.write_text("fastpath: true")
    origin = f"default set (fastpath: true in {path})"
    patches = {patch.name: record(patch, origin=origin if patch.default_on else "") for patch in PATCHES}
    environ = {"XDG_RUNTIME_DIR": str(theirs)}
    arguments = ("--deploy-config", "deploy.yaml")
    with fake_server(*arguments, environ=environ, said=said(patches, source="deploy.yaml"), cwd=tmp_path) as pid:
        assert of_server(pid) == []
        path.write_text(f"fastpath: {{{ON.name}: false}}")
        assert of_server(pid) == [("yaml-changed", WARNING)]
        path.write_text("fastpath: true")
        assert of_server(pid) == []


def test_an_idle_patch(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter is 0 and upstream's has moved; or /metrics has nothing of ours."""
    idle = {ON.name: record(ON, counters={ON.counters[0].name: 0})}
    totals = {ON.counters[0].moves_with: 500.0, "omni_fastpath_patch_state": 1.0}
    monkeypatch.setattr(facts, "scrape", lambda url: facts.Scrape(totals))
    environ = {"XDG_RUNTIME_DIR": str(theirs), "OMNI_FASTPATH": "1"}
    with fake_server(environ=environ, said=said(idle, port=8091)) as pid:
        assert of_server(pid) == [("patch-idle", WARNING)]
    del totals["omni_fastpath_patch_state"]
    with fake_server(environ=environ, said=said(port=8091)) as pid:
        assert of_server(pid) == [("metrics-without-us", WARNING)]


def test_a_stage_whose_server_is_gone() -> None:
    """This process says that it is a stage, and no server is above it."""
    statefile.write(said(role="stage"))
    assert [each.id for each in found() if str(os.getpid()) in each.do] == ["stage-without-server"]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shared memory, looked at for real."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "find", lambda: FIND(folder, tmp_path / "none", ()))
    return folder


def test_what_a_dead_server_left(shared: Path) -> None:
    """A chunk and its lock, a minute old; the command names both."""
    for name in ("req_0_1", "shm_req_0_1_lockfile.lock"):
        (shared / name).write_bytes(b"x")
        os.utime(shared / name, (time.time() - 100,) * 2)
    [left] = [each for each in found() if each.subject == rules.MACHINE and each.id == "shared-memory-left"]
    assert f"rm -- {shared}/req_0_1 {shared}/shm_req_0_1_lockfile.lock" in left.do
    assert {each.name for each in shared.iterdir()} == {"req_0_1", "shm_req_0_1_lockfile.lock"}


@pytest.mark.parametrize(
    ("rule", "variables"),
    [
        ("plugins-leave-us-out", {"VLLM_PLUGINS": "vllm_omni_register_models"}),
        ("plugins-leave-upstream-out", {"VLLM_PLUGINS": "omni_fastpath"}),
        ("variable-unknown", {f"{ON.env}X": "1"}),
        ("configuration-refused", {ON.env: "maybe"}),
        ("variable-injected", {"OMNI_FASTPATH_SERVICE_HOST": "10.0.0.1"}),
        ("metrics-folder", {"PROMETHEUS_MULTIPROC_DIR": "/nowhere"}),
    ],
)
def test_a_broken_shell(rule: str, variables: dict[str, str]) -> None:
    """What a server that is started from here would meet."""
    assert ids(found(**variables)) == [rule]


def test_a_broken_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No entry point; a release that nobody read; a hook plugin that cannot be imported; a folder that is a file."""
    with monkeypatch.context() as patched:
        patched.setattr(entrypoint, "entry_points", lambda **_: ())
        assert ids(found()) == ["entry-point-missing"]
    with monkeypatch.context() as patched:
        patched.setattr(install, "vllm_omni_release", lambda: Release("vllm-omni", "0.99.0"))
        told = [each for each in found() if each.severity is Severity.ERROR and each.subject == rules.HERE]
        assert {each.id for each in told} == {"patch-unsupported"}
        assert len(told) == sum(patch.default_on for patch in PATCHES)
    with monkeypatch.context() as patched:
        points = (EntryPoint("logbook", "no_such_module:PLUGIN", "omni_fastpath.hooks"),)
        patched.setattr("importlib.metadata.entry_points", lambda **_: points)
        assert ids(found()) == ["hook-plugin-unusable"]
    with monkeypatch.context() as patched:
        (tmp_path / "runtime/omni-fastpath").write_text("")
        assert ids(found()) == ["state-folder-unusable"]


def test_a_folder_that_containers_share() -> None:
    """A state file of another process namespace, written since the machine booted."""
    path = statefile.write(said())
    path.with_name(f"7-1-{path.stem.rpartition('-')[2]}.json").write_text("{}")
    assert ids(found()) == ["state-folder-shared"]


def test_seams_that_are_not_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another body."""
    problem = "argparse:Namespace.__eq__: its body moved"
    monkeypatch.setattr(install, "verify_all", lambda given: {patch.name: [problem] for patch in given})
    monkeypatch.setattr(status, "live_servers", lambda *_, **_kw: ([], []))  # theirs have more patches than one
    one = [dataclasses.replace(ON)]
    told = judge(status.look({}, one, verify=True))
    assert ids(told) == ["seam-moved"]
