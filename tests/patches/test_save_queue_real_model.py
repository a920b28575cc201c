"""A held stream comes back with the tokens that it would have had: real schedulers and runners, a real tiny model.

`tests.patches.real_stages` serves the streams in a process of its own; here is what must be true of what it found.
Differences are those to the run in which nobody was held: tokens of each stage, and what the last one sent on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.more, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMNI_SIMULATED_DEVICE": "real",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",  # sums in one order only
}

Results = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every run, once: about a minute of one core."""
    from omni_simulated_device import models

    folder = tmp_path_factory.mktemp("real")
    models.write_qwen3_omni_tiny(folder / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_FASTPATH")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.patches.real_stages", str(folder / "model"), str(folder / "results.json")],
        cwd=REPOSITORY,
        env={**environment, **ENVIRONMENT, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    found: Results = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("part", ["thinker", "pipeline"])
def test_the_comparison_is_fair(results: Results, part: str) -> None:
    """In the run that the others are compared with, tokens vary and no stream is held."""
    free = results[part]["free"]
    # With async scheduling each stream waits one step for its last token.
    assert all(count <= 1 for stage in free["left_out"] for count in stage.values())
    for tokens in (tokens for stage in free["tokens"] for tokens in stage.values()):
        assert len(set(tokens)) > len(tokens) / 2
    assert all(free["values"].values())


def test_held_streams_of_the_thinker(results: Results) -> None:
    """Each left out of many steps at random, one that samples with a seed, two between the pieces of their prompts."""
    run = results["thinker"]["held"]
    assert run["left_out"][0].keys() == run["tokens"][0].keys()
    assert all(count >= 5 for count in run["left_out"][0].values()), run["left_out"]
    assert run["left_out_of_prompt"][0].keys() == {"long", "longer"}
    assert run["differences"] == []


def test_held_and_preempted(results: Results) -> None:
    """With too few blocks of KV cache some streams are preempted as well, and computed again; tokens alone compared."""
    run = results["thinker"]["preempted"]
    assert run["preempted"][0] > 0
    assert all(count >= 3 for count in run["left_out"][0].values()), run["left_out"]
    assert run["differences"] == []


def test_held_streams_of_the_pipeline(results: Results) -> None:
    """The talker samples with a seed and takes a row of the thinker's each step; its frames are the same too."""
    run = results["pipeline"]["held"]
    for stage in range(2):
        assert all(run["left_out"][stage].get(stream, 0) >= 3 for stream in run["tokens"][stage]), run["left_out"]
    assert run["differences"] == []


def test_streams_that_the_patch_holds(results: Results) -> None:
    """`save_queue_cap` holds streams whose sends are slow; everything comes out as without the patch."""
    run = results["pipeline"]["patched"]
    assert run["counters"]["holds"] >= 10
    assert run["counters"]["expired_holds"] == 0
    # How many at which stage is the machine's choice: where steps are slow the talker's sends keep up with them.
    assert sum(sum(stage.values()) for stage in run["left_out"]) >= 40, run["left_out"]
    assert run["differences"] == []
