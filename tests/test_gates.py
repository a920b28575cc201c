"""The gate before the stages, on the real upstream; each case in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import isolated
from tests.fakes.registration import (
    ALL_ON,
    GATE,
    HEADLESS_GATE,
    asked,
    engine,
    holder,
    is_ours,
    log,
    ours,
    raw,
    read,
    register,
    state_files,
    states,
    yaml,
)


@pytest.mark.upstream
@isolated("warm")
def test_swallowed_refusal_is_raised_before_the_spawn(tmp_path: Path) -> None:
    """Where upstream swallows the reader's error, its next step raises it; a good file passes."""
    from omni_fastpath.config import ConfigError

    register()
    bad = yaml(tmp_path, "bad.yaml", fastpath={"budgeted_drian": True})
    for _ in range(2):
        with pytest.raises(ConfigError, match="budgeted_drian"):
            engine(bad)
    gate = raw(*GATE)
    assert engine(yaml(tmp_path, **ALL_ON)) == []
    assert raw(*GATE) is gate
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")


@pytest.mark.upstream
@isolated("warm")
def test_refusal_ends_with_its_file(tmp_path: Path) -> None:
    """A refusal that the user caught refuses no other engine, with or without a file, and not the file once mended."""
    from omni_fastpath.config import ConfigError

    register()
    bad = yaml(tmp_path, "bad.yaml", fastpath={"budgeted_drian": True})
    with pytest.raises(ConfigError):
        read(bad)
    assert engine(None) == []
    assert engine(yaml(tmp_path)) == []
    with pytest.raises(ConfigError):
        engine(bad)
    assert engine(yaml(tmp_path, "bad.yaml", **ALL_ON)) == []


@pytest.mark.upstream
@isolated("warm")
def test_unsupported_patch_refuses_the_start_under_fail(tmp_path: Path) -> None:
    """``on_unsupported: fail`` and a seam that moved: the reading raises, all is taken off, the gate is closed."""
    from omni_fastpath.install import RefusedError

    owner, name = holder("vllm_omni.engine.orchestrator", "OrchestratorBase._orchestration_loop")
    setattr(owner, name, lambda self, more: None)
    register()
    file = yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "on_unsupported": "fail"})
    with pytest.raises(RefusedError, match="budgeted_drain is unsupported: a seam moved"):
        read(file)
    assert ours() == {"resolve_deploy_yaml"}
    with pytest.raises(RefusedError):
        engine(file)
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ


@pytest.mark.upstream
@isolated("warm")
def test_gate_is_upstreams_own_where_nothing_is_asked(tmp_path: Path) -> None:
    """Without a block and without a variable the gate's slots are not touched."""
    register()
    assert engine(yaml(tmp_path)) == []
    assert not is_ours(raw(*GATE))
    importlib.import_module(HEADLESS_GATE[0])
    assert not is_ours(raw(*HEADLESS_GATE))


# ---- Without a deploy YAML ----


def headless_devices() -> Any:
    """What a headless server calls before it spawns."""
    return importlib.import_module(HEADLESS_GATE[0]).get_headless_replica_devices(_NoDevices(), 0, 1)


class _NoDevices:
    runtime_config = None
    runtime: Any = None
    stage_id = 0


@pytest.mark.upstream
@pytest.mark.parametrize("value", ["maybe", ""])
@pytest.mark.parametrize("headless", [False, True])
@isolated("warm")
def test_bad_variable_refuses_a_server_without_a_yaml(value: str, headless: bool) -> None:
    """Nothing is read, and still the engine is refused before its stages; log and state file name the variable."""
    from omni_fastpath.config import ConfigError

    os.environ["OMNI_FASTPATH_BUDGETED_DRAIN"] = value
    messages = log()
    register()
    assert (messages, states(), state_files()) == ([], {}, [])
    with pytest.raises(ConfigError, match=f"OMNI_FASTPATH_BUDGETED_DRAIN: found {value!r}"):
        headless_devices() if headless else engine(None)
    assert any("OMNI_FASTPATH_BUDGETED_DRAIN: found" in message for message in messages)
    assert set(states().values()) == {"failed"}
    [shown] = state_files()
    assert "OMNI_FASTPATH_BUDGETED_DRAIN: found" in shown["patches"]["budgeted_drain"]["reason"]


@pytest.mark.upstream
@isolated("warm")
def test_master_off_validates_nothing_without_a_yaml() -> None:
    """Under ``OMNI_FASTPATH=0`` a bad variable refuses nobody, and the gate is upstream's own."""
    os.environ.update(OMNI_FASTPATH="0", OMNI_FASTPATH_BUDGETED_DRAIN="maybe")
    register()
    assert engine(None) == []
    assert not is_ours(raw(*GATE))


@pytest.mark.upstream
@isolated("warm")
def test_patch_that_cannot_serve_refuses_without_a_yaml() -> None:
    """``OMNI_FASTPATH_ON_UNSUPPORTED=fail`` holds for an engine that reads no deploy YAML."""
    from omni_fastpath.install import RefusedError

    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_ON_UNSUPPORTED="fail")
    owner, name = holder("vllm_omni.engine.orchestrator", "OrchestratorBase._orchestration_loop")
    setattr(owner, name, lambda self, more: None)
    register()
    with pytest.raises(RefusedError, match="budgeted_drain is unsupported"):
        engine(None)
    assert ours() == {"resolve_deploy_yaml"}


@pytest.mark.upstream
@pytest.mark.parametrize("headless", [False, True])
@isolated("warm")
def test_stage_patch_by_variable_alone_reaches_the_stages(headless: bool) -> None:
    """A variable that switches on only what the stages have is handed to them, without a deploy YAML too."""
    os.environ["OMNI_FASTPATH_FORWARD_GATE"] = "1"
    if headless:
        sys.argv[1:] = ["serve", "model", "--omni", "--headless"]
    register()
    if headless:
        headless_devices()
    else:
        engine(None)
    assert states()["forward_gate"] == "not_applicable"
    assert "forward_gate" in json.loads(json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])["resolved"])["enabled"]
