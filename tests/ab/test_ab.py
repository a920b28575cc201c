"""``python -m benchmarks.ab`` on a server and a client in a few lines each: order, proof, failures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.ab import __main__ as ab
from benchmarks.ab import states
from omni_fastpath import config
from omni_fastpath.tools import cli
from tests.tools.made import plain_read

SERVER = '''
"""Serves /health and streamed chat; leaves a state file that says what OMNI_FASTPATH says, or what it is told to."""
import http.server, json, os, sys
from omni_fastpath import process_role, state
from omni_fastpath.patches import PATCHES

port, behaviour = int(sys.argv[1]), sys.argv[2:]
if "dies" in behaviour:
    sys.exit("no memory left on this device")
is_on = os.environ.get("OMNI_FASTPATH") == "1" or "--deploy-config" in behaviour
on = {p.name for p in PATCHES if p.default_on and is_on}
lie = "lies" in behaviour and is_on
state.write({
    "schema": state.SCHEMA, "pid": os.getpid(), "started": process_role.started(os.getpid()),
    "role": "server", "process_name": "APIServer", "omni_fastpath": "0", "vllm": None, "vllm_omni": None,
    "source": None, "above": [], "updated": 0.0, "cpu_s": {}, "stage": None, "replica": None, "port": None,
    "patches": {p.name: {"state": "failed" if lie else "applied" if p.name in on else "off", "same_as": "",
                         "reason": "a seam moved" if lie else "", "counters": {"items": 7} if p.name in on else {}}
                for p in PATCHES},
})


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer("text/plain", b"")

    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        event = {"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": "stop"}], "modality": "text"}
        self.answer("text/event-stream", f"data: {json.dumps(event)}\\n\\ndata: [DONE]\\n\\n".encode())


http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''

BENCH = '''
"""Writes what upstream's client writes: figures that follow from what the server's state file says it is."""
import json, os, sys
from omni_fastpath import state

result, behaviour = sys.argv[2], sys.argv[3:]
if "fails" in behaviour:
    sys.exit("no such dataset")
live = [each for each in state.read_live() if each["pid"] != os.getpid()]
fast = any(r["state"] == "applied" for each in live for r in each["patches"].values())
factor = (2.0 if "slower" in behaviour else 0.5) if fast else 1.0
factor *= 1 + (os.getpid() % 97) / 10000
audio_ms = 0.0 if fast and "mute" in behaviour else 300 * factor
with open(result, "w") as file:
    json.dump({"completed": 8, "failed": 0, "request_throughput": 2.5 / factor, "median_ttft_ms": 110 * factor,
               "median_audio_ttfp_ms": audio_ms, "std_ttft_ms": 3.0, "mean_itl_ms": 0.0}, file)
'''

Run = Callable[..., int]
OFF_ON = ["--a", "OMNI_FASTPATH=0", "--b", "OMNI_FASTPATH=1"]
PRIMARY = ["--primary", "median_ttft_ms"]


def _command(folder: Path, *options: str, serve: str = "", bench: str = "") -> list[str]:
    """The words of a command line: with two scripts in this folder that behave so."""
    (folder / "server.py").write_text(SERVER)
    (folder / "client.py").write_text(BENCH)
    server = [sys.executable, str(folder / "server.py"), "{port}", *serve.split()]
    client = [sys.executable, str(folder / "client.py"), "{port}", "{result}", *bench.split()]
    return ["--starts", "2", *options, "--", *server, "--", *client]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Compares in this process, in a folder of its own; afterwards no process of its commands is running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(states, "SETTLE_S", 0.0)
    monkeypatch.setattr(config, "read", plain_read)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield lambda *options, **behaviour: ab.main(_command(tmp_path, *options, **behaviour))
    for number, handler in before.items():
        signal.signal(number, handler)
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


def _starts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("results/ab.jsonl").read_text().splitlines()]


def test_starts_come_as_a_b_b_a_and_each_is_its_arm(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting is variables or a deploy YAML, its server runs it, and two starts give no verdict."""
    (tmp_path / "fast.yaml").write_text("fastpath: true\n")
    assert run("--a", "OMNI_FASTPATH=0", "--b", "fast.yaml") == 0
    found = _starts()
    assert [start["arm"] for start in found] == [f"A {_A}", "B fast.yaml", "B fast.yaml", f"A {_A}"]
    counted = [
        sum(n for each in start["counters"].values() for one in each.values() for n in one.values()) for start in found
    ]
    assert [count > 0 for count in counted] == [False, True, True, False]
    shown = capsys.readouterr().out
    assert re.search(r"median_audio_ttfp_ms.* 0\.\d\d .*too few starts", shown)
    assert "std_ttft_ms" not in shown
    assert "mean_itl_ms" not in shown
    assert "alike. 8 requests in each start were compared byte by byte" in " ".join(shown.split())


_A = "OMNI_FASTPATH=0"


@pytest.mark.parametrize(
    ("behaviour", "options", "told"),
    [
        ({"serve": "dies"}, OFF_ON, "ended with status 1.* no memory left on this device"),
        ({"bench": "fails"}, OFF_ON, "measured nothing.* no such dataset"),
        ({"serve": "lies"}, OFF_ON, r"setting B OMNI_FASTPATH=1: .*budgeted_drain is failed \(a seam moved\)"),
        ({}, [*OFF_ON, "--primary", "median_tpot_ms"], "found median_tpot_ms, measured: "),
        ({"bench": "slower"}, [*OFF_ON, "--starts", "4", *PRIMARY], r"median_ttft_ms ((?!_ms).)*worse \("),
        ({"bench": "mute"}, OFF_ON, "MISSING in starts of B: median_audio_ttfp_ms"),
    ],
)
def test_what_does_not_end_well_is_told(
    run: Run, capsys: pytest.CaptureFixture[str], behaviour: dict[str, str], options: list[str], told: str
) -> None:
    """The exit code is 1, and the message has the end of the log.

    With four starts per arm, twice the time is worse in the measure that was named. A primary measure that only A has
    leaves no verdict, which must not look well.
    """
    assert run(*options, **behaviour) == 1
    assert re.search(told, " ".join(capsys.readouterr().out.split()))


def test_the_installed_command_names_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    """``omni-fastpath ab`` ends with 2 and a sentence."""
    assert cli.main(["ab", "--starts", "2", "--", "true"]) == 2
    assert "run `python -m benchmarks.ab` from a clone" in capsys.readouterr().err
