"""A server and a benchmark client in a few lines each: what ``omni-fastpath ab`` sees of real ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SERVER = '''
"""Serves /health and streamed chat; leaves a state file that says what OMNI_FASTPATH says, or what it is told to."""
import http.server, json, os, pathlib, signal, subprocess, sys, threading, time
from omni_fastpath import statefile
from omni_fastpath.patches import PATCHES

port, behaviour = int(sys.argv[1]), sys.argv[2:]
master = os.environ.get("OMNI_FASTPATH")
if "dies" in behaviour:
    sys.exit("no memory left on this device")
on = {p.name for p in PATCHES if p.default_on} if master == "1" else set()
on |= {p.name for p in PATCHES if os.environ.get(p.env) == "1"}
on -= {p.name for p in PATCHES if os.environ.get(p.env) == "0"}
lie = "lies" in behaviour and master == "1"
if master is not None:
    statefile.write({
        "role": "server", "process_name": "APIServer", "omni_fastpath": "0", "vllm": None, "vllm_omni": None,
        "source": None,
        "patches": {p.name: {"state": "failed" if lie else "applied" if p.name in on else "off",
                             "reason": "a seam moved" if lie else "", "counters": {"items": 7} if p.name in on else {}}
                    for p in PATCHES},
    })
if "sleeps" in behaviour:
    open("sleeping", "w").close()
    time.sleep(600)
if "falls" in behaviour:
    def fall():
        while not list(pathlib.Path("out").rglob("*.started")):
            time.sleep(0.05)
        os._exit(5)
    threading.Thread(target=fall).start()
if "stubborn" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
words = "one two three"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if "holds" in behaviour:
            open("holding", "w").close()
            time.sleep(600)
        events = [{"choices": [{"index": 0, "delta": {"content": w + " "}}], "modality": "text"} for w in words.split()]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "modality": "text"})
        lines = [f"data: {json.dumps(e)}\\n\\n" for e in events] + ["data: [DONE]\\n\\n"]
        body = "".join(lines).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
if "stubborn" not in behaviour:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server.serve_forever()
'''

BENCH = '''
"""Writes what upstream's client writes: figures that follow from what the server's state file says it is."""
import json, os, sys, time, urllib.request

port, result, behaviour = sys.argv[1], sys.argv[2], sys.argv[3:]
urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
from omni_fastpath import statefile
live = [each for each in statefile.read_live() if each["pid"] != os.getpid()]
fast = any(r["state"] == "applied" for each in live for r in each["patches"].values())
if "hangs" in behaviour:
    open(result + ".started", "w").close()
    time.sleep(600)
if "fails" in behaviour:
    sys.exit("no such dataset")
if "mute" in behaviour:
    sys.exit()
factor = (2.0 if "slower" in behaviour else 0.5) if fast else 1.0
jitter = 1 + (os.getpid() % 97) / 10000
with open(result, "w") as file:
    json.dump({
        "backend": "openai-chat-omni", "duration": 3.2, "completed": 8, "failed": 0,
        "request_throughput": 2.5 / factor * jitter, "median_ttft_ms": 110 * factor * jitter,
        "median_audio_ttfp_ms": 300 * factor * jitter,
    }, file)
'''


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this shell's, and a working folder of its own."""
    for name in [*os.environ]:
        if name.startswith(("OMNI_SIMULATED", "OPENAI_API_KEY")) or name == "VLLM_PLUGINS":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., list[str]]:
    """The server's command, with these behaviours."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return lambda *behaviour: [sys.executable, str(script), "{port}", *behaviour]


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., list[str]]:
    """The client's command, with these behaviours."""
    script = tmp_path / "client.py"
    script.write_text(BENCH)
    chat = ("--backend", "openai-chat-omni")
    return lambda *behaviour: [sys.executable, str(script), "{port}", "{result}", *behaviour, *chat]
