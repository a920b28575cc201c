"""Whole series on a server and a client in a few lines each: order, proof, answers, failures, interrupts, files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_fastpath.tools import cli
from omni_fastpath.tools.ab.interrupts import Interrupts

Command = Callable[..., list[str]]
OFF_ON = ["--a", "OMNI_FASTPATH=0", "--b", "OMNI_FASTPATH=1"]
NAMED = ["--a", "stock=OMNI_FASTPATH=0", "--b", "fastpath=OMNI_FASTPATH=1"]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state files of a server in a few lines do not change."""
    monkeypatch.setattr("omni_fastpath.tools.ab.states.SETTLE_S", 0.0)
    monkeypatch.setattr("omni_fastpath.tools.ab.states._PATIENCE_S", 1.0)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """After each test no process of its commands is running."""
    yield
    assert _of(tmp_path) == []


def _of(folder: Path) -> list[list[str]]:
    """The commands of the processes that run a script of this folder, or were started in it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            command = process.cmdline() if mine else []
            if mine and (any(str(folder) in word for word in command) or process.cwd() == str(folder)):
                found.append(command)
    return found


def _ab(serve: list[str], bench: list[str], *options: str, out: str = "out") -> int:
    return cli.main(["ab", "--starts", "2", *options, "--out", out, "--", *serve, "--", *bench])


def _report(out: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(out, "ab.json").read_text())
    return found


def test_starts_come_as_a_b_b_a_and_each_is_its_arm(
    serve: Command, bench: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has order, measures, states and answers of each start, and two starts give no verdict."""
    monkeypatch.setenv("VLLM_OMNI_TOKEN", "secret")
    assert _ab(serve(), bench(), *NAMED) == 4
    found = _report()
    assert found["order"] == ["stock", "fastpath", "fastpath", "stock"]
    assert (found["complete"], found["exit_code"], found["worse"], found["better"]) == (True, 4, [], [])
    assert found["arms"] == {
        arm: f"OMNI_FASTPATH={on} VLLM_OMNI_TOKEN=***" for arm, on in (("stock", 0), ("fastpath", 1))
    }
    primary = next(row for row in found["rows"] if row["primary"])
    assert primary["name"] == "first audio (TTFP), median"
    assert primary["ratio"] == pytest.approx(0.5, rel=0.02)
    assert primary["verdict"]["word"] == "too few starts"
    states = {arm: {p["state"] for p in said[0]["patches"].values()} for arm, said in found["states"].items()}
    assert states == {"stock": {"off"}, "fastpath": {"off", "applied"}}
    assert found["answers"]["why"] == "the 2 starts of stock answered identically"
    assert {path.name for path in Path("out").iterdir()} == {"ab.json", "ab.md", "starts", "results", "logs"}
    shown = capsys.readouterr()
    assert "first audio (TTFP)" in shown.out
    assert "too few starts" in shown.out.splitlines()[-1]
    assert "4 starts, one after another: stock fastpath fastpath stock" in shown.err
    assert "4/4 stock: benchmark client" in shown.err
    assert " left" in shown.err


def _name_and_word(row: dict[str, Any]) -> tuple[str, str | None]:
    return row["name"], row["verdict"] and row["verdict"]["word"]


def test_worse_is_exit_code_1(serve: Command, bench: Command) -> None:
    """With four starts per arm, twice the time is worse, also when the files are compared again."""
    assert _ab(serve(), bench("slower"), *OFF_ON, "--starts", "4") == 1
    found = _report()
    assert "first audio (TTFP), median" in found["worse"]
    assert found["order"] == [*"ABBAABBA"]
    starts = sorted(map(str, Path("out/starts").iterdir()))
    assert cli.main(["ab", "compare", "--out", "again", *starts]) == 1
    again = _report("again")
    # Not the figures: the oldest pydantic reads a number's last digit otherwise.
    assert [_name_and_word(row) for row in again["rows"]] == [_name_and_word(row) for row in found["rows"]]
    assert cli.main(["ab", "compare", "--out", "turned", starts[1], starts[0], *starts[2:]]) == 0
    assert "first audio (TTFP), median" in _report("turned")["better"]


# ---- What goes wrong ----


@pytest.mark.parametrize(
    ("behaviour", "options", "told"),
    [
        ("dies", [], "ended with status 1.* no memory left on this device"),
        ("fails", [], "no such dataset"),
        ("mute", [], "wrote no result that can be read"),
        ("falls hangs", [], "the server ended with status 5"),
        ("lies", OFF_ON, r"setting B: .*budgeted_drain is failed \(a seam moved\), expected applied"),
        ("", ["--primary", "median_tpot_ms"], "median_tpot_ms, which was not measured"),
    ],
)
def test_what_ends_a_series_is_told(
    serve: Command, bench: Command, capsys: pytest.CaptureFixture[str], behaviour: str, options: list[str], told: str
) -> None:
    """The exit code is 3, the message has the end of the log, and the report has the starts that were complete."""
    assert _ab(serve(*behaviour.split()), bench(*behaviour.split()), *options) == 3
    assert re.search(told, " ".join(capsys.readouterr().err.split()))
    found = _report()
    assert (found["complete"], found["order"]) == (False, ["A"] if options else [])
    assert "the end of" not in found["ended"]


def test_an_unforeseen_error_ends_a_series_with_its_report(
    serve: Command, bench: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An internal error is exit code 3, with a traceback and a report."""
    monkeypatch.setattr("omni_fastpath.tools.ab.series._ask", lambda *_: [].get("choices"))  # type: ignore[attr-defined]
    assert _ab(serve(), bench()) == 3
    assert "Traceback" in capsys.readouterr().err
    assert _report()["ended"] == "after 0 starts: AttributeError: 'list' object has no attribute 'get'"


# ---- Interrupts ----


@pytest.mark.parametrize(
    ("server", "client", "marker", "number"),
    [
        ("sleeps", "", "sleeping", signal.SIGINT),
        ("holds", "", "holding", signal.SIGHUP),
        ("stubborn", "hangs", "out/results/01-A.json.started", signal.SIGTERM),
    ],
)
def test_an_interrupt_leaves_no_process_and_a_report(
    serve: Command, bench: Command, tmp_path: Path, server: str, client: str, marker: str, number: signal.Signals
) -> None:
    """Ctrl-C while a server starts, SIGHUP while a request waits for its answer, SIGTERM while the client runs.

    The third server ignores SIGTERM and has a child outside its group. Both are killed after a second signal.
    """
    with _started(serve(server), bench(client), stderr=subprocess.PIPE) as running:
        _wait_for(tmp_path / marker)
        running.send_signal(number)
        if server == "stubborn":
            time.sleep(1.0)
            running.send_signal(number)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Interrupted" in said
    assert _of(tmp_path) == []
    found = _report()
    assert (found["complete"], found["ended"], found["order"]) == (False, "interrupted", [])
    assert "INCOMPLETE" in (tmp_path / "out" / "ab.md").read_text()


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    """An ignored SIGHUP stays ignored."""
    before, interrupts = signal.signal(signal.SIGHUP, signal.SIG_IGN), Interrupts()
    with interrupts.caught():
        signal.raise_signal(signal.SIGHUP)
    assert (signal.signal(signal.SIGHUP, before), interrupts.count) == (signal.SIG_IGN, 0)


def test_an_interrupt_that_ended_who_reads_too(serve: Command, bench: Command, tmp_path: Path) -> None:
    """If Ctrl-C also ends the reader of a pipe, the report is written and the exit code is 130."""
    with _started(serve(), bench("hangs"), stderr=subprocess.STDOUT, stdout=subprocess.PIPE) as running:
        _wait_for(tmp_path / "out" / "results" / "01-A.json.started")
        assert running.stdout is not None
        running.stdout.close()
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
    assert _of(tmp_path) == []
    assert _report()["ended"] == "interrupted"


def _started(serve: list[str], bench: list[str], **streams: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "omni_fastpath", "ab", "--starts", "2", "--out", "out"]
    return subprocess.Popen(
        [*command, "--", *serve, "--", *bench], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **streams
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def test_a_port_that_speaks_no_http_is_not_healthy() -> None:
    """A server of another protocol, such as SSH, is not healthy."""
    from omni_fastpath.tools.ab.serving import healthy

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def banner() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=banner)
        thread.start()
        assert healthy(f"http://127.0.0.1:{listening.getsockname()[1]}") is False
        thread.join(10)


def test_the_fixed_requests_have_the_clients_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed requests have the client's headers, which override the key of the environment."""
    from omni_fastpath.tools.ab import series
    from omni_fastpath.tools.ab.capture import chat_request

    sent: list[Any] = []

    def ask(_url: str, _requests: object, headers: dict[str, str]) -> list[Any]:
        sent.append(headers)
        return []

    monkeypatch.setenv("OPENAI_API_KEY", "old")
    monkeypatch.setattr(series, "ask", ask)
    series._ask("http://127.0.0.1:1", [chat_request("x")], {"authorization": "Bearer new", "x": "1"})
    assert sent == [{"authorization": "Bearer new", "x": "1"}]
