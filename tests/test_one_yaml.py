"""One deploy YAML while vLLM-Omni is upgraded and downgraded below it: no start fails for a reason of ours.

`make matrix` runs this on every release; each case in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.declare import Options, Process
from omni_fastpath.patches import PATCHES
from tests.fakes.processes import isolated
from tests.fakes.registration import NOTHING, asked, declared, engine, ours, register, spawned, state_files, yaml

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

BLOCK: dict[str, Any] = {
    "nonblocking_dequeue": True,
    "budgeted_drain": {"max_items": 8, "max_time_us": 1000},
    "connections": True,
    "delivery": True,
    "admission_limit": True,
    "submission_errors": True,
    "abandoned_chunks": True,
    "save_queue_cap": {"max_bytes": "128MiB", "max_tasks": 4096, "max_hold_s": 2.0},
    "forward_gate": True,
    "lean_front_end": {"summary": "line"},
    "lean_processing": True,
    "queue_metrics": True,
}
"""Every patch, and every value that there is, none at its default."""


def test_the_yaml_says_all_that_can_be_said() -> None:
    """The YAML has every value of every patch, and none is the default."""
    for patch in PATCHES:
        said = BLOCK[patch.name]
        if patch.options is Options:
            assert said is True
        else:
            values, defaults = patch.options.model_validate(said), patch.options()
            assert said.keys() == patch.options.model_fields.keys()
            assert [name for name in said if getattr(values, name) == getattr(defaults, name)] == []
    assert BLOCK.keys() == {patch.name for patch in PATCHES}


@isolated("cold")
def test_it_starts_on_this_release(tmp_path: Path) -> None:
    """In a server and a stage, each patch has its declared state, also under ``fail``."""
    register()
    engine(yaml(tmp_path, fastpath={**BLOCK, "on_unsupported": "fail"}))
    assert asked() == declared("server", every=True)
    seen, _, _ = spawned()
    assert seen == declared("stage", every=True)


@isolated("cold")
def test_an_untested_release(tmp_path: Path) -> None:
    """Every patch is unsupported and names the found release, and only ``on_unsupported: fail`` refuses the start."""
    from omni_fastpath.process_role import RefusedError

    metadata = tmp_path / "another" / "vllm_omni-0.31.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.31.0\n")
    sys.path.insert(0, str(metadata.parent))
    register()
    engine(yaml(tmp_path, fastpath=BLOCK))
    [shown] = state_files()
    for patch in PATCHES:
        found = shown["patches"][patch.name]
        if Process.SERVER in patch.processes:
            assert found["state"] == "unsupported"
            assert "vllm-omni 0.31.0 is not among the tested releases: " in found["reason"]
        else:
            assert found["state"] == "not_applicable"
    with pytest.raises(RefusedError) as refused:
        engine(yaml(tmp_path, fastpath={**BLOCK, "on_unsupported": "fail"}))
    assert str(refused.value).count("vllm-omni 0.31.0 is not among the tested releases: ") == len(PATCHES)
    assert all(f"{patch.name} is unsupported: " in str(refused.value) for patch in PATCHES)
    assert ours() == NOTHING
