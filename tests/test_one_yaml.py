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
from tests.fakes.registration import asked, engine, ours, read, register, spawned, state_files, yaml

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]

BLOCK: dict[str, Any] = {
    "nonblocking_dequeue": True,
    "budgeted_drain": {
        "max_items": 8,
        "max_time_us": 1000,
        "stop_at_first_routable": False,
        "order": "downstream_first",
        "floor": 0.05,
    },
    "final_output_wakeup": True,
    "save_queue_cap": {
        "max_bytes": "128MiB",
        "max_tasks": 4096,
        "max_hold_s": 2.0,
    },
    "forward_gate": True,
    "lean_front_end": {"summary": "line"},
    "lean_processing": True,
    "gc_pacing": {"few": 3, "at_most_s": 60.0},
    "queue_metrics": True,
}
"""Every patch, and every value that there is, none at its default."""


def test_the_yaml_says_all_that_can_be_said() -> None:
    """Of every patch every value, each another one than its default."""
    for patch in PATCHES:
        said = BLOCK[patch.name]
        if patch.options is Options:
            assert said is True
        else:
            values, defaults = patch.options.model_validate(said), patch.options()
            assert said.keys() == patch.options.model_fields.keys()
            assert [name for name in said if getattr(values, name) == getattr(defaults, name)] == []
    assert BLOCK.keys() == {patch.name for patch in PATCHES}


def declared(kind: Process) -> dict[str, str]:
    """What each patch's row says of it on the installed release, in a process of that kind."""
    from omni_fastpath.install import state_here

    return {patch.name: state_here(patch).value if kind in patch.processes else "not_applicable" for patch in PATCHES}


@isolated("cold")
def test_it_starts_on_this_release(tmp_path: Path) -> None:
    """Server and stage: each patch is what its row says, under ``fail`` too."""
    register()
    engine(yaml(tmp_path, fastpath={**BLOCK, "on_unsupported": "fail"}))
    assert asked() == declared(Process.SERVER)
    seen, _, _ = spawned()
    assert seen == declared(Process.STAGE)


def installed_is(folder: Path, release: str) -> None:
    """Have this process find a vLLM-Omni of that release, whose code is that of the installed one."""
    metadata = folder / "another" / f"vllm_omni-{release.partition('+')[0]}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-omni\nVersion: {release}\n")
    sys.path.insert(0, str(metadata.parent))


@isolated("cold")
def test_it_starts_as_stock_on_an_untested_release(tmp_path: Path) -> None:
    """Every patch is unsupported and names the release that was found."""
    installed_is(tmp_path, "0.31.0")
    register()
    engine(yaml(tmp_path, fastpath=BLOCK))
    assert asked() == {
        patch.name: "unsupported" if Process.SERVER in patch.processes else "not_applicable" for patch in PATCHES
    }
    [shown] = state_files()
    for patch in PATCHES:
        if Process.SERVER in patch.processes:
            assert shown["patches"][patch.name]["reason"].startswith("vllm-omni 0.31.0 is ")
    assert ours() == {"resolve_deploy_yaml"}


@isolated("cold")
def test_fail_alone_refuses_it_there(tmp_path: Path) -> None:
    """Under ``on_unsupported: fail``, with the patch, the release that was found and those that were read."""
    from omni_fastpath.install import RefusedError

    installed_is(tmp_path, "0.31.0")
    register()
    with pytest.raises(RefusedError) as refused:
        engine(yaml(tmp_path, fastpath={**BLOCK, "on_unsupported": "fail"}))
    told = "vllm-omni 0.31.0 is not among the tested releases: "
    for patch in PATCHES:
        assert f"{patch.name} is unsupported: " in str(refused.value)
    assert str(refused.value).count(told) == len(PATCHES)
    assert ours() == {"resolve_deploy_yaml"}


@isolated("cold")
def test_a_bad_value_is_refused_before_the_stages_are_spawned(tmp_path: Path) -> None:
    """On each release the reading refuses it, and so does the engine's start, whose own reading is swallowed."""
    from omni_fastpath.config import ConfigError

    register()
    bad = yaml(tmp_path, fastpath={**BLOCK, "budgeted_drain": {"max_itmes": 8}})
    for start in (read, engine):
        with pytest.raises(ConfigError, match="max_itmes"):
            start(bad)
