"""Whole series on a server and a client in a few lines each: order, proof, answers, failures, interrupts, files."""

from __future__ import annotations

import contextlib
import json
import os
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
    """After every test no process is left that this test's commands started."""
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
    """The order, what each start measured, the states of each arm, and every file; two starts decide nothing."""
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
    assert found["answers"]["comparisons"] == 27
    assert {path.name for path in Path("out").iterdir()} == {"ab.json", "ab.md", "starts", "results", "logs"}
    assert sorted(path.stem for path in Path("out/starts").iterdir()) == [
        "01-stock",
        "02-fastpath",
        "03-fastpath",
        "04-stock",
    ]
    shown = capsys.readouterr()
    assert "stock: OMNI_FASTPATH=0" in shown.out
    assert "first audio (TTFP)" in shown.out
    assert "too few starts" in shown.out.splitlines()[-1]
    assert "4 starts, one after another: stock fastpath fastpath stock" in shown.err
    assert "4/4 stock: benchmark client" in shown.err
    assert " left" in shown.err


def _name_and_word(row: dict[str, Any]) -> tuple[str, str | None]:
    return row["name"], row["verdict"] and row["verdict"]["word"]


def test_worse_is_exit_code_1(serve: Command, bench: Command) -> None:
    """Six starts an arm and twice the time: the measures say worse; they can be judged again from the files."""
    assert _ab(serve(), bench("slower"), *OFF_ON, "--starts", "6") == 1
    found = _report()
    assert "first audio (TTFP), median" in found["worse"]
    assert found["order"] == [*"ABBAABBAABBA"]
    starts = sorted(map(str, Path("out/starts").iterdir()))
    assert cli.main(["ab", "compare", "--out", "again", *starts]) == 1
    again = _report("again")
    # Not the figures: the oldest pydantic reads a number's last digit otherwise.
    assert [_name_and_word(row) for row in again["rows"]] == [_name_and_word(row) for row in found["rows"]]
    assert cli.main(["ab", "compare", "--out", "turned", starts[1], starts[0], *starts[2:]]) == 0
    assert "first audio (TTFP), median" in _report("turned")["better"]


# ---- What goes wrong ----


@pytest.mark.parametrize(
    ("server", "client", "options", "told", "order"),
    [
        ("dies", "", [], ["ended with status 1", "no memory left on this device"], []),
        (
            "lies",
            "",
            OFF_ON,
            ["does not run the setting B:", "budgeted_drain is failed (a seam moved), expected applied"],
            ["A"],
        ),
        ("", "fails", [], ["no such dataset"], []),
        ("", "mute", [], ["wrote no result that can be read"], []),
        ("falls", "hangs", [], ["the server ended with status 5"], []),
        ("", "", ["--primary", "median_tpot_ms"], ["median_tpot_ms, which was not measured"], ["A"]),
    ],
)
def test_what_ends_a_series_is_told(
    serve: Command,
    bench: Command,
    capsys: pytest.CaptureFixture[str],
    server: str,
    client: str,
    options: list[str],
    told: list[str],
    order: list[str],
) -> None:
    """With the end of its log, which the report leaves out; exit code 3, and the starts before it are reported."""
    assert _ab(serve(server), bench(client), *options) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert [each for each in told if each not in said] == []
    found = _report()
    assert (found["complete"], found["order"]) == (False, order)
    assert "the end of" not in found["ended"]


def test_an_unforeseen_error_ends_a_series_with_its_report(
    serve: Command, bench: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 and not 1, which says that a measure is worse; with the traceback, which is a mistake of ours."""
    monkeypatch.setattr("omni_fastpath.tools.ab.series._ask", lambda *_: [].get("choices"))  # type: ignore[attr-defined]
    assert _ab(serve(), bench()) == 3
    assert "Traceback" in capsys.readouterr().err
    assert _report()["ended"] == "after 0 starts: AttributeError: 'list' object has no attribute 'get'"


# ---- Interrupts ----


@pytest.mark.parametrize(
    ("server", "client", "marker", "number"),
    [
        ("sleeps", "", "sleeping", signal.SIGINT),
        ("holds", "", "holding", signal.SIGTERM),
        ("stubborn", "hangs", "out/results/01-A.json.started", signal.SIGTERM),
    ],
)
def test_an_interrupt_leaves_no_process_and_a_report(
    serve: Command, bench: Command, tmp_path: Path, server: str, client: str, marker: str, number: signal.Signals
) -> None:
    """While a server starts, while a request waits for its answer, and while the client runs.

    The third server ignores SIGTERM and has a child outside its group. Both are killed after a second signal.
    """
    with _started(serve(server), bench(client)) as running:
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


def test_an_interrupt_that_ended_who_reads_too(serve: Command, bench: Command, tmp_path: Path) -> None:
    """Ctrl-C under ``2>&1 | tee log`` ends ``tee`` too: the report is written, and the exit code is an interrupt's."""
    with _started(serve(), bench("hangs"), stderr=subprocess.STDOUT, stdout=subprocess.PIPE) as running:
        _wait_for(tmp_path / "out" / "results" / "01-A.json.started")
        assert running.stdout is not None
        running.stdout.close()
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 130
    assert _of(tmp_path) == []
    assert _report()["ended"] == "interrupted"


def _started(
    serve: list[str], bench: list[str], *, stderr: int = subprocess.PIPE, stdout: int | None = None
) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "omni_fastpath", "ab", "--starts", "2", "--out", "out"]
    return subprocess.Popen(
        [*command, "--", *serve, "--", *bench],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def test_a_port_that_speaks_no_http_is_not_healthy() -> None:
    """As that of an SSH server: it answers, and not to what it was asked."""
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
    """A key that only ``--header`` has opens the server to them too; it wins over the variable, as with the client."""
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
