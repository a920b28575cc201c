"""What is seen of live servers: each by its own variables, folder, deploy YAML and tree."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath import processid, statefile
from omni_fastpath.tools.findings import facts
from omni_fastpath.tools.findings.facts import Server, configuration, live_servers, scrape, unwritable
from tests.findings.made import PATCHES, fake_server, snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Another runtime folder than this shell's."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    return theirs


def seen(pid: int, **asked: Any) -> Server:
    """The server, among whatever else runs on this machine."""
    found, _ = live_servers(statefile.read_live(), **asked)
    return next(each for each in found if each.pid == pid)


def test_a_server_is_read_from_its_own_folder_and_variables(folder: Path, tmp_path: Path) -> None:
    """Its XDG_RUNTIME_DIR is not the shell's, its YAML is relative to where it runs, its children belong to it."""
    (tmp_path / "deploy.yaml").write_text("fastpath: {drum: true, flute: false}")
    environ = {"XDG_RUNTIME_DIR": str(folder), "OMNI_FASTPATH_FLUTE": "1"}
    title = "VLLM::StageEngineCoreProc_stage0_replica0"
    arguments = ("--deploy-config", "deploy.yaml", "--port", "8091")
    with fake_server(*arguments, environ=environ, said=snapshot(0), children=[title], cwd=tmp_path) as pid:
        server = seen(pid)
        assert server.folder == folder / "omni-fastpath"
        assert server.own is not None
        assert (server.own["pid"], server.own["port"]) == (pid, 8091)
        assert server.deploy_yaml == tmp_path / "deploy.yaml"
        resolved = server.resolved(PATCHES)
        assert resolved is not None
        assert set(resolved.enabled) == {"drum", "flute"}
        [child] = [each for each in server.members if each.title.startswith(title)]
        assert child.loads_plugins
        assert server.scrape is None
    assert pid not in {each.pid for each in live_servers(statefile.read_live())[0]}


def test_a_server_without_a_state_file_is_seen(folder: Path) -> None:
    """By its command line alone."""
    with fake_server(environ={"XDG_RUNTIME_DIR": str(folder)}) as pid:
        server = seen(pid)
        assert (server.own, server.is_on, server.deploy_yaml) == (None, False, None)
        assert server.arguments == ("serve", "model", "--omni")


def test_a_folder_that_cannot_be_used_is_told(folder: Path) -> None:
    """A file stands where the server's folder should."""
    (folder / "omni-fastpath").write_text("")
    with fake_server(environ={"XDG_RUNTIME_DIR": str(folder)}) as pid:
        assert "is no folder" in seen(pid).folder_problem


def test_a_stage_without_a_server_is_stray() -> None:
    """Nobody above it is a server."""
    Path(os.environ["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    statefile.write(snapshot(0, "stage"))
    _, stray = live_servers(statefile.read_live())
    assert os.getpid() in [each["pid"] for each in stray]  # others' may be at their end just now


def test_a_stage_that_has_ended_since_its_file_was_read_is_not_stray() -> None:
    """It is gone, or another process has its id."""
    Path(os.environ["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    statefile.write(snapshot(0, "stage"))
    [read] = statefile.read_live()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert live_servers([{**read, "pid": ended.pid}])[1] == []
    assert live_servers([{**read, "started": read["started"] - 1}])[1] == []


def test_who_may_write(tmp_path: Path) -> None:
    """A folder that is there, one that can be made, a file in the way."""
    assert unwritable(tmp_path) == ""
    assert unwritable(tmp_path / "to be/made") == ""
    (tmp_path / "file").write_text("")
    assert unwritable(tmp_path / "file" / "omni-fastpath") == f"{tmp_path}/file is no folder"


def test_files_of_other_namespaces_are_told_from_those_of_other_boots() -> None:
    """Only the first are of containers on this machine."""
    Path(os.environ["XDG_RUNTIME_DIR"]).mkdir(mode=0o700)
    path = statefile.write(snapshot(0))
    path.with_name(f"7-1-{processid.boot_id()}.json").write_text("{}")
    path.with_name("7-1-0123.json").write_text("{}")
    assert (statefile.foreign(), statefile.of_other_namespaces()) == (2, 1)


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP"])
def test_the_folder_of_another_process(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its own variables lead, whatever this process's say."""
    monkeypatch.setattr(statefile, "_is_private", lambda base: base.parent == tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    assert statefile.folder({"XDG_RUNTIME_DIR": str(tmp_path / "run")}) == tmp_path / "run/omni-fastpath"
    assert statefile.folder({name: str(tmp_path)}) == tmp_path / f"runtime-{os.geteuid()}/omni-fastpath"


def test_this_shells_tmpdir_is_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without TMPDIR has its folder where ``tempfile`` looks there, whatever this shell's says."""
    monkeypatch.setattr(statefile, "_is_private", lambda base: False)
    monkeypatch.setattr(statefile, "_can_be_made", lambda base: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = f"runtime-{os.geteuid()}/omni-fastpath"
    assert statefile.folder() == tmp_path / ours
    assert statefile.folder({}) == Path("/tmp") / ours  # noqa: S108
    assert statefile.folder({"TMPDIR": str(tmp_path / "none")}) == Path("/tmp") / ours  # noqa: S108
    monkeypatch.setattr(statefile, "_TEMPORARY", ())
    with pytest.raises(OSError, match="no folder for temporary files"):
        statefile.folder({})


METRICS = b"""# TYPE vllm:request_success counter
vllm:request_success_total{reason="stop"} 3.0
vllm:request_success_total{reason="length"} 4.0
"""


def test_what_is_no_http_is_told() -> None:
    """Another program's answer on that port ends nothing: http.client's exceptions are no OSErrors."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_answer, args=(listening, b"220 mail.example.org ESMTP\r\n"))
        thread.start()
        told = scrape(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join()
    assert "/metrics does not answer" in told.problem


def test_who_listens_and_says_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """From who refuses, and from a port where nobody is."""
    monkeypatch.setattr(facts, "SCRAPE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
        assert scrape(url).timed_out
    told = scrape(url)
    assert told.problem
    assert not told.timed_out


def _answer(listening: socket.socket, with_what: bytes) -> None:
    connected, _ = listening.accept()
    with connected:
        connected.recv(1000)
        connected.sendall(with_what)


def test_a_folder_and_a_yaml_where_nobody_may_look_end_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is told as the server's trouble, the other is as good as none."""

    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(facts, "unwritable", refuse)
    environ = {"XDG_RUNTIME_DIR": str(folder), "OMNI_FASTPATH_DRUM": "1"}
    with fake_server("--deploy-config", str(tmp_path / "deploy.yaml"), environ=environ) as pid:
        server = seen(pid)
    assert "Permission denied" in server.folder_problem
    monkeypatch.setattr(Path, "is_file", refuse)
    assert server.deploy_yaml is None
    resolved, refusal = configuration(server, PATCHES)
    assert resolved is not None
    assert (set(resolved.enabled), refusal) == ({"drum"}, "")


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer /metrics."""
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(METRICS)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server of metrics."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_scrape_adds_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series' samples, past a proxy that somebody has set."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert scrape(f"http://127.0.0.1:{port}/metrics").totals == {"vllm:request_success_total": 7.0}
    assert "does not answer" in scrape(f"http://127.0.0.1:{port}/nothing").problem


def test_only_a_port_that_the_state_file_knows_is_asked(port: int, folder: Path) -> None:
    """And only when the caller wants it."""
    environ = {"XDG_RUNTIME_DIR": str(folder)}
    with fake_server(environ=environ, said={**snapshot(0), "port": port}) as pid:
        told = seen(pid, scrape=True).scrape
        assert told is not None
        assert told.totals
    with fake_server("--port", str(port), environ=environ, said={**snapshot(0), "port": None}) as pid:
        told = seen(pid, scrape=True).scrape
        assert told is not None
        assert told.problem == "its state file names no port"


def test_the_findings_import_nothing_of_upstream() -> None:
    """Looking costs no import of torch, and prometheus_client only for a scrape."""
    script = (
        "import sys; import omni_fastpath.tools.findings; "
        "print([name for name in ('torch', 'vllm', 'vllm_omni', 'wrapt', 'prometheus_client') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
