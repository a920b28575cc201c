"""``AsyncOmni`` in a process that is not ``vllm serve``, as NVIDIA Dynamo, Ray Serve and trainers use it.

Run as a program, this file is such a process. Its last line of output is what it saw, as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]

COUNTS = {
    "nonblocking_dequeue": "dequeued",
    "budgeted_drain": "items",
    "lean_processing": "raw_outputs",
}
"""Patches that act without an API server, each with a counter that shows it."""


def _embedder(model: Path, **variables: str) -> dict[str, Any]:
    """What a process with these variables reports."""
    from benchmarks.rigs.server import OFFLINE
    from tests.fakes.processes import process
    from tests.server.conftest import DEPLOY

    command = (sys.executable, __file__, str(model), str(DEPLOY / "qwen3_omni.yaml"))
    done = process(*command, **OFFLINE, OMNI_SIMULATED_DEVICE="light", **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_an_embedded_engine_answers_as_stock(models: Callable[[str], Path]) -> None:
    """Eight answers equal stock's, and ``REGISTRY`` has the metrics."""
    model = models("qwen3_omni")
    stock = _embedder(model, OMNI_FASTPATH="0")
    fast = _embedder(model, OMNI_FASTPATH="1")
    assert fast["answers"] == stock["answers"]
    assert all(each["text"] and each["samples"] and each["finished"] for each in stock["answers"])
    assert stock["states"] == {}
    assert [fast["states"].get(f"server {name}") for name in COUNTS] == ["applied"] * len(COUNTS)
    assert [name for name, event in COUNTS.items() if not fast["events"][f"{name} {event}"]] == []
    assert fast["states"]["LightEngines forward_gate"] == "applied"


# ---- The process ----


async def _ask(omni: Any, number: int) -> dict[str, Any]:
    """The answer to one question."""
    text, audio, samples, finished = "", hashlib.sha256(), 0, 0
    prompt = {"prompt": "Question " * (number + 1)}
    async for output in omni.generate(prompt, request_id=f"r{number}"):
        finished += output.finished
        if output.final_output_type == "text":
            text += output.outputs[0].text
            continue
        found = output.multimodal_output["audio"]
        for chunk in found if isinstance(found, list) else [found]:
            audio.update(chunk.numpy().tobytes())
            samples += chunk.numel()
    return {"text": text, "samples": samples, "audio": audio.hexdigest(), "finished": finished}


async def _serve(model: str, deploy: str) -> dict[str, Any]:
    from prometheus_client import REGISTRY
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    seen: dict[str, Any] = {"states": {}, "events": {}}
    omni = AsyncOmni(model=model, deploy_config=deploy)
    try:
        seen["answers"] = await asyncio.gather(*(_ask(omni, number) for number in range(8)))
        if os.environ["OMNI_FASTPATH"] == "1":
            await asyncio.sleep(5)  # the processes are collected every two seconds, and not by a scrape
        for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
            labels = sample.labels
            if sample.name == "omni_fastpath_patch_state" and sample.value:
                seen["states"][f"{labels['process']} {labels['patch']}"] = labels["state"]
            elif sample.name == "omni_fastpath_events_total" and labels["process"] == "server":
                seen["events"][f"{labels['patch']} {labels['event']}"] = sample.value
    finally:
        omni.shutdown()
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_serve(*sys.argv[1:]))) + "\n")
