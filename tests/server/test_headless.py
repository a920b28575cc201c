"""Stages in servers of their own, one of them attached while its sibling serves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ab.serving import Child
from tests.server.conftest import DEPLOY, all_states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(1500)]

PATIENCE_S = 400.0
"""For a process that starts on a busy machine."""
FILE = DEPLOY / "qwen3_omni.yaml"


@contextlib.contextmanager
def headless(server: Any, stage: int, master: tuple[str, ...], folder: Path) -> Iterator[None]:
    """``vllm serve --headless`` for one stage, in the server's environment."""
    from benchmarks.rigs.server import VLLM

    command = [str(VLLM), "serve", server.model, "--omni", "--headless", "--deploy-config", str(FILE)]
    command += ["--stage-id", str(stage), *master]
    log = folder / f"stage{stage}-{time.monotonic_ns()}.log"
    child = Child(command=command, environment=server.environment(), log=log, folder=folder)
    child.start()
    try:
        yield
    finally:
        child.stop()


def talkers(server: Any) -> list[dict[str, Any]]:
    """The entries of ``forward_gate`` in the talkers' processes."""
    found = [each["forward_gate"] for each in all_states(server, "stage")]
    return [each for each in found if each["state"] == "applied"]


def test_headless_stages_serve_and_one_more_attaches(server: Callable[..., Any], tmp_path: Path) -> None:
    """Headless talker and code2wav serve, and a second talker joins and gets requests."""
    from benchmarks.ab.capture import chat_request
    from benchmarks.ab.serving import free_port
    from benchmarks.rigs.captures import differences, run_closed_loop

    requests = [chat_request(f"Question {n}", max_tokens=8 + n, ignore_eos=True) for n in range(8)]
    master = ("--omni-master-address", "127.0.0.1", "--omni-master-port", str(free_port()))
    arguments = ("--stage-id", "0", *master, "--omni-lb-policy", "round-robin")
    head = server("qwen3_omni", FILE, environment={"OMNI_FASTPATH": "1"}, arguments=arguments)
    with contextlib.ExitStack() as stack:
        stack.callback(head.stop)
        for stage in (1, 2):
            stack.enter_context(headless(head, stage, master, tmp_path))
        head.start()
        first = run_closed_loop(head.url, requests, 4)
        assert all(capture.succeeded and capture.audio for capture in first)
        assert len(talkers(head)) == 1
        stack.enter_context(headless(head, 1, master, tmp_path))
        deadline = time.monotonic() + PATIENCE_S
        while len(told := talkers(head)) < 2 or not all(each["counters"]["multimodal_outputs"] for each in told):
            assert time.monotonic() < deadline, json.dumps(told)
            time.sleep(3)  # without this the requests take the processor from the stage that starts
            assert differences(run_closed_loop(head.url, requests, 4), first) == []
        headless_ones = all_states(head, "headless")
    assert len(headless_ones) == 3
    assert {entry["state"] for states in headless_ones for entry in states.values()} <= {"not_applicable", "off"}
