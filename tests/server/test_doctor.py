"""``doctor`` beside a real server: nothing is cried while it is well; what breaks is found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.findings import Finding, Severity, judge, rules
from omni_fastpath.tools.status import look
from tests.server.conftest import DEPLOY

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ENGINES = 3
REFRESHED_S = 3.0
"""State files are refreshed every two seconds."""


def _of(server: Any) -> list[Finding]:
    """What is found of the server from a shell with another runtime folder."""
    facts = look({}, PATCHES, deep=True)
    [pid] = [each.pid for each in facts.servers if str(server.port) in (each.command or ())]
    return [each for each in judge(facts) if each.subject == f"server {pid}" and each.severity is not Severity.INFO]


@contextlib.contextmanager
def _stopped(server: Any) -> Iterator[psutil.Process]:
    """A stage that stands still, so that its state file does not come back."""
    [pid] = [pid for pid, role in server.processes().items() if role == "stage0_replica0"]
    stage = psutil.Process(pid)
    stage.send_signal(signal.SIGSTOP)
    try:
        yield stage
    finally:
        stage.send_signal(signal.SIGCONT)


def test_a_healthy_server_and_one_that_is_broken_while_it_runs(
    server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server with its own folder and YAML: well after a load; then its YAML is edited, and a stage falls silent."""
    from omni_fastpath.tools.ab.capture import chat_request, run_closed_loop

    deploy = tmp_path / "deploy.yaml"
    on = {patch.name: True for patch in PATCHES if patch.default_on or patch.counters[0].moves_with}
    text = f"base_config: {DEPLOY / 'qwen3_omni.yaml'}\nfastpath: "
    deploy.write_text(text + json.dumps(on))
    requests = [chat_request(f"Question {n}", modalities=("text", "audio"), max_tokens=6) for n in range(24)]
    with server("qwen3_omni", deploy) as running:
        assert all(capture.succeeded for capture in run_closed_loop(running.url, requests, 8))
        time.sleep(REFRESHED_S)
        facts = look({}, PATCHES, deep=True)
        [seen] = [each for each in facts.servers if str(running.port) in (each.command or ())]
        assert len(seen.snapshots) == 1 + ENGINES
        assert seen.scrape is not None
        assert seen.scrape.totals["vllm:request_success_total"] >= rules.IDLE_REQUESTS
        assert seen.scrape.totals["omni_fastpath_patch_state"] > 0
        for patch in PATCHES:  # what must move with upstream's counter does
            if patch.counters[0].moves_with:
                assert sum(each["counters"][patch.counters[0].name] for each in seen.records(patch.name)) > 0, (
                    patch.name
                )
        monkeypatch.setattr(rules, "SETTLED_S", 0.0)
        assert _of(running) == []
        command = [sys.executable, "-m", "omni_fastpath", "doctor", "--json", "--no-verify"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_FASTPATH")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        [told] = [each for each in json.loads(done.stdout)["servers"] if each["pid"] == seen.pid]
        assert told["reporting"] == 1 + ENGINES

        deploy.write_text(text + json.dumps(on | {"budgeted_drain": {"max_items": 8}}))
        [found] = _of(running)
        assert found.id == "yaml-changed"
        deploy.write_text(text + json.dumps(on))

        with _stopped(running) as stage:
            [file] = running.runtime_folder.glob(f"omni-fastpath/{stage.pid}-*.json")
            file.unlink()
            [found] = _of(running)
            assert found.id == "process-silent"
            assert str(stage.pid) in str(found.evidence["processes"])
        time.sleep(REFRESHED_S)
        assert _of(running) == []
