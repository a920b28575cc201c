"""How the package comes into a process, on the real upstream; each case in a process of its own."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import ROOT, isolated

STAGE = "StageEngineCoreProc_stage0_replica0"
READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
GATE = ("vllm_omni.engine.stage_runtime", "StageRuntime._build_logical_stage_init_plans")
ALL_ON: dict[str, Any] = {
    "fastpath": {"nonblocking_dequeue": True, "budgeted_drain": True, "final_output_wakeup": True}
}


def yaml(folder: Path, name: str = "deploy.yaml", **content: Any) -> Path:
    """A deploy YAML (JSON is YAML) with one stage."""
    file = folder / name
    file.write_text(json.dumps({"stages": [{"stage_id": 0}], **content}), encoding="utf-8")
    return file


def holder(module: str, path: str) -> tuple[Any, str]:
    """The object that owns a slot, and the slot's name."""
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = vars(owner)[parent]
    return owner, name


def raw(module: str, path: str) -> Any:
    """A raw slot; None when it is absent."""
    owner, name = holder(module, path)
    return vars(owner).get(name)


def is_ours(value: Any) -> bool:
    """Whether a slot holds something of ours."""
    return type(value).__name__ == "FunctionWrapper" or getattr(value, "__module__", "").startswith("omni_fastpath")


def ours() -> set[str]:
    """Every slot of a patch, the reader's and the gate's that holds something of ours."""
    from omni_fastpath.patches import PATCHES

    keys = {READER, GATE}
    for patch in PATCHES:
        keys |= {(s.module, s.qualname) for s in patch.seams}
    return {path for module, path in keys if is_ours(raw(module, path))}


DRAIN = {
    "OrchestratorBase._orchestration_loop",
    "OrchestratorBase._orchestration_loop_event_driven",
    "StagePool.add_client",
}
DEQUEUE = {"AsyncMPClient.get_output_nowait"}
WAKEUP = {"OmniEngineBase.try_get_output_async", "OmniEngineBase.get_output_blocking_async"}
EVERYTHING = DRAIN | DEQUEUE | WAKEUP


def states() -> dict[str, str]:
    """What the ledger of this process says."""
    from omni_fastpath.ledger import LEDGER

    return {entry.patch.name: entry.state.value for entry in LEDGER}


def asked(found: dict[str, str] | None = None) -> dict[str, str]:
    """Of the states, this process's or the given ones, those of patches that somebody asked for."""
    return {name: state for name, state in (states() if found is None else found).items() if state != "off"}


def default_set(kind: str) -> dict[str, str]:
    """The states of the default set in a process of that kind."""
    from omni_fastpath.patches import PATCHES

    return {
        patch.name: "applied" if kind in {each.value for each in patch.processes} else "not_applicable"
        for patch in PATCHES
        if patch.default_on
    }


def state_files() -> list[dict[str, Any]]:
    """The state files of processes that live."""
    from omni_fastpath import statefile

    return statefile.read_live()


def register() -> None:
    """Register as vLLM's loader does."""
    from omni_fastpath import bootstrap

    bootstrap.register()


def read(file: Path) -> Any:
    """Read a deploy YAML as upstream does."""
    from vllm_omni.config import stage_config

    return stage_config.resolve_deploy_yaml(file)


# ---- What it costs to be there ----


@pytest.mark.parametrize("module", ["omni_fastpath.bootstrap", "omni_fastpath.patches", "omni_fastpath.cli"])
def test_import_is_cheap(module: str) -> None:
    """Neither machinery nor declarations import torch, vllm, vLLM-Omni, wrapt or pluggy."""
    script = f"import sys, {module}; print(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "vllm", "vllm_omni", "wrapt", "pluggy", "janus", "numpy"} & set(run.stdout.split())


def test_registration_without_upstream() -> None:
    """In a process where nothing of vLLM is ever imported registration returns, twice, and says nothing."""
    script = "from omni_fastpath.bootstrap import register; register(); register()"
    environment = {**os.environ, "OMNI_FASTPATH": "1"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert (run.stdout, run.stderr) == ("", "")


@pytest.mark.upstream
def test_upstreams_loader_finds_it_in_both_groups() -> None:
    """The installed distribution's entry points of both plugin groups are the registration."""
    from importlib.metadata import entry_points

    for group in ("vllm.general_plugins", "vllm_omni.general_plugins"):
        [found] = [point for point in entry_points(group=group) if point.name == "omni_fastpath"]
        assert found.value == "omni_fastpath.bootstrap:register"


@pytest.mark.upstream
@isolated("cold")
def test_upstreams_loader_arms_it() -> None:
    """The plugin loader of vLLM arms the reader and nothing else, although both groups name the registration."""
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    reader = raw(*READER)
    assert is_ours(reader)
    assert not is_ours(reader.__wrapped__)
    assert ours() == {"resolve_deploy_yaml"}


# ---- Nothing asked for ----


@pytest.mark.upstream
@isolated("cold")
def test_plain_process_has_one_slot_touched() -> None:
    """Registered twice and nothing asked for: the reader is wrapped once, every patch's slot is upstream's own."""
    register()
    register()
    reader = raw(*READER)
    assert reader.__wrapped__.__code__.co_name == "resolve_deploy_yaml"
    assert not hasattr(reader.__wrapped__, "__wrapped__")
    assert ours() == {"resolve_deploy_yaml"}
    assert (states(), state_files()) == ({}, [])


@pytest.mark.upstream
@pytest.mark.parametrize("block", [{}, {"fastpath": False}, {"fastpath": None}, {"fastpath": {}}])
@isolated("cold")
def test_yaml_that_asks_for_nothing_leaves_nothing(tmp_path: Path, block: dict[str, Any]) -> None:
    """A deploy YAML without a block, or with one that is off, is read as upstream reads it and leaves no trace."""
    register()
    file = yaml(tmp_path, **block)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert ours() == {"resolve_deploy_yaml"}
    assert (states(), state_files()) == ({}, [])
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ
    assert "pluggy" not in {name for name in sys.modules if name.startswith("omni_fastpath.hooks")}


@pytest.mark.upstream
@isolated("cold")
def test_master_off_touches_nothing(tmp_path: Path) -> None:
    """``OMNI_FASTPATH=0``: not even the reader is wrapped, a bad block and a bad variable are not validated."""
    os.environ.update(OMNI_FASTPATH="0", OMNI_FASTPATH_NO_SUCH="1")
    register()
    read(yaml(tmp_path, fastpath={"no_such_patch": 1}))
    assert ours() == set()
    assert (states(), state_files()) == ({}, [])


@pytest.mark.upstream
@isolated("cold", "serve", "model", "--omni")
def test_master_off_is_shown_for_a_server() -> None:
    """A server under ``OMNI_FASTPATH=0`` has a state file that says why everything is off."""
    os.environ["OMNI_FASTPATH"] = "0"
    register()
    [file] = state_files()
    assert {name: (p["state"], p["reason"]) for name, p in file["patches"].items()} == dict.fromkeys(
        states(), ("off", "OMNI_FASTPATH=0")
    )
    assert ours() == set()


# ---- The environment alone ----


@pytest.mark.upstream
@isolated("cold")
def test_environment_installs_at_import() -> None:
    """What the environment switches on is installed when its modules are there, without any deploy YAML."""
    os.environ["OMNI_FASTPATH"] = "1"
    register()
    assert "vllm_omni" not in sys.modules
    for module in ("vllm_omni.engine.orchestrator", "vllm_omni.engine.omni_engine_base"):
        importlib.import_module(module)
    assert asked() == default_set("server")
    assert ours() >= EVERYTHING
    [file] = state_files()
    assert file["source"] == "environment"


@pytest.mark.upstream
@isolated("warm")
def test_environment_installs_at_registration() -> None:
    """Where the modules are there already it is installed at registration."""
    os.environ["OMNI_FASTPATH_FINAL_OUTPUT_WAKEUP"] = "1"
    register()
    assert states()["final_output_wakeup"] == "applied"
    assert ours() == {"resolve_deploy_yaml"} | WAKEUP


@pytest.mark.upstream
@isolated("warm")
def test_what_needs_the_yaml_waits_for_it(tmp_path: Path) -> None:
    """A variable whose patch requires one that only the YAML switches on: the rest is installed, that one later."""
    os.environ.update(OMNI_FASTPATH_BUDGETED_DRAIN="1", OMNI_FASTPATH_FINAL_OUTPUT_WAKEUP="1")
    register()
    assert ours() == {"resolve_deploy_yaml"} | WAKEUP
    read(yaml(tmp_path, fastpath={"nonblocking_dequeue": True}))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("variable", "value"),
    [("OMNI_FASTPATH_NO_SUCH", "1"), ("OMNI_FASTPATH", "perhaps"), ("OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS", "-1")],
)
@isolated("warm")
def test_bad_variable_is_refused_when_the_yaml_is_read(tmp_path: Path, variable: str, value: str) -> None:
    """Registration passes over it, a plain process never hears of it; the reading of a deploy YAML names it."""
    from omni_fastpath.config import ConfigError

    os.environ[variable] = value
    register()
    assert ours() == {"resolve_deploy_yaml"}
    with pytest.raises(ConfigError, match=variable):
        read(yaml(tmp_path))
    assert ours() == {"resolve_deploy_yaml", GATE[1]}


@pytest.mark.upstream
@isolated("warm")
def test_refusal_by_the_environment_is_raised_at_the_reading(tmp_path: Path) -> None:
    """Where the environment alone asks and a patch cannot serve, an import does not fail; the reading does."""
    from omni_fastpath.install import RefusedError

    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_ON_UNSUPPORTED="fail")
    owner, name = holder("vllm_omni.engine.orchestrator", "OrchestratorBase._orchestration_loop")
    setattr(owner, name, lambda self, more: None)
    register()
    assert ours() == {"resolve_deploy_yaml"}
    with pytest.raises(RefusedError, match="budgeted_drain is unsupported"):
        read(yaml(tmp_path))
    assert ours() == {"resolve_deploy_yaml", GATE[1]}


# ---- The deploy YAML ----


@pytest.mark.upstream
@isolated("cold")
def test_block_takes_effect_when_it_is_read(tmp_path: Path) -> None:
    """The patches of the block are installed before upstream gets its dictionary, which is as stock's."""
    register()
    file = yaml(tmp_path, **ALL_ON)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert ours() == {"resolve_deploy_yaml"} | EVERYTHING
    [shown] = state_files()
    assert (shown["source"], shown["role"]) == (str(file), "server")
    assert asked({name: patch["state"] for name, patch in shown["patches"].items()}) == dict.fromkeys(
        ALL_ON["fastpath"], "applied"
    )


@pytest.mark.upstream
@isolated("warm")
def test_every_reader_of_upstream_comes_through(tmp_path: Path) -> None:
    """``load_deploy_config``, imported by others before we came, reads the block too."""
    from vllm_omni.config.config_factory import load_deploy_config

    register()
    load_deploy_config(yaml(tmp_path, fastpath={"final_output_wakeup": True}))
    assert states()["final_output_wakeup"] == "applied"


@pytest.mark.upstream
@isolated("warm")
def test_overlay_is_merged_key_by_key(tmp_path: Path) -> None:
    """A base that switches patches on and an overlay that changes one value: both count, and the chain is read once."""
    from omni_fastpath.ledger import LEDGER

    register()
    block = {**ALL_ON["fastpath"], "budgeted_drain": {"max_items": 5, "max_time_us": 700}}
    (tmp_path / "base").mkdir()
    yaml(tmp_path / "base", fastpath=block)
    overlay = yaml(
        tmp_path,
        "overlay.yaml",
        base_config="base/deploy.yaml",
        fastpath={"budgeted_drain": {"max_items": 9}, "final_output_wakeup": False},
    )
    result = read(overlay)
    assert result["stages"] == [{"stage_id": 0}]
    options: Any = LEDGER.named("budgeted_drain").options
    assert (options.max_items, options.max_time_us) == (9, 700)
    assert ours() == {"resolve_deploy_yaml"} | DRAIN | DEQUEUE


@pytest.mark.upstream
@isolated("warm")
def test_environment_wins_over_the_yaml(tmp_path: Path) -> None:
    """A variable changes a value of the block and switches a patch of it off."""
    from omni_fastpath.ledger import LEDGER

    os.environ.update(OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS="3", OMNI_FASTPATH_FINAL_OUTPUT_WAKEUP="0")
    register()
    read(yaml(tmp_path, **ALL_ON))
    options: Any = LEDGER.named("budgeted_drain").options
    assert options.max_items == 3
    assert ours() == {"resolve_deploy_yaml"} | DRAIN | DEQUEUE


@pytest.mark.upstream
@isolated("warm")
def test_another_yaml_is_applied_anew(tmp_path: Path) -> None:
    """A second deploy YAML in the same process takes off, adds and changes values; the file's source follows."""
    from omni_fastpath.ledger import LEDGER

    register()
    read(yaml(tmp_path, "one.yaml", **ALL_ON))
    read(yaml(tmp_path, "two.yaml", fastpath={"nonblocking_dequeue": True, "budgeted_drain": {"max_items": 2}}))
    options: Any = LEDGER.named("budgeted_drain").options
    assert options.max_items == 2
    assert ours() == {"resolve_deploy_yaml"} | DRAIN | DEQUEUE
    read(yaml(tmp_path, "three.yaml"))
    assert ours() == {"resolve_deploy_yaml"}
    assert set(states().values()) == {"off"}
    for name in ("four.yaml", "five.yaml"):
        file = yaml(tmp_path, name, **ALL_ON)
        read(file)
        assert [shown["source"] for shown in state_files()] == [str(file)]
    assert ours() == {"resolve_deploy_yaml"} | EVERYTHING


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"budgeted_drian": True}, r"fastpath\.budgeted_drian in .*budgeted_drain"),
        ({"budgeted_drain": {"max_items": "many"}}, r"fastpath\.budgeted_drain\.max_items"),
        ({"budgeted_drain": True}, "requires fastpath.nonblocking_dequeue"),
        ("yes", "true, false or a mapping"),
    ],
)
@isolated("warm")
def test_bad_block_is_refused(tmp_path: Path, block: Any, message: str) -> None:
    """The reading raises and names the key; no patch is installed, and nothing is handed on."""
    from omni_fastpath.config import ConfigError

    register()
    with pytest.raises(ConfigError, match=message):
        read(yaml(tmp_path, fastpath=block))
    assert ours() - {GATE[1]} == {"resolve_deploy_yaml"}
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ


@pytest.mark.upstream
@isolated("warm")
def test_upstreams_error_stays_upstreams(tmp_path: Path) -> None:
    """A file that upstream cannot read fails as on stock, and the next reading works."""
    register()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
        read(tmp_path / "missing.yaml")
    with pytest.raises(Exception) as stock:  # noqa: PT011
        raw(*READER).__wrapped__(tmp_path / "missing.yaml")
    assert (type(caught.value), str(caught.value)) == (type(stock.value), str(stock.value))
    read(yaml(tmp_path, **ALL_ON))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")


@pytest.mark.upstream
@isolated("warm")
def test_own_failure_leaves_a_stock_server(tmp_path: Path) -> None:
    """An error of ours that is no refusal is logged, and upstream gets its dictionary."""
    from omni_fastpath import handoff

    register()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.omni_fastpath").addHandler(handler)

    def breaks(*_: object) -> None:
        raise RuntimeError("no process table")

    setattr(handoff, "export", breaks)  # noqa: B010 - mypy knows the function's type
    assert read(yaml(tmp_path, **ALL_ON))["stages"]
    assert any(f"{tmp_path / 'deploy.yaml'} could not take effect" in message for message in messages)


# ---- The gate ----


def _plans() -> Any:
    """Call upstream's step before the spawn as the engine does."""
    runtime = sys.modules[GATE[0]].StageRuntime
    return runtime._build_logical_stage_init_plans(_NoStages(), None, [], {})


class _NoStages:
    _stage_configs = ()


@pytest.mark.upstream
@isolated("warm")
def test_swallowed_refusal_is_raised_before_the_spawn(tmp_path: Path) -> None:
    """Where upstream swallows the reader's error, its next step raises it; after a good reading it is open again."""
    from vllm_omni.engine.stage_init_utils import load_omni_transfer_config_for_model

    from omni_fastpath.config import ConfigError

    register()
    bad = yaml(tmp_path, "bad.yaml", fastpath={"budgeted_drian": True})
    assert load_omni_transfer_config_for_model("model", str(bad)) is None
    for _ in range(2):
        with pytest.raises(ConfigError, match="budgeted_drian"):
            _plans()
    gate = raw(*GATE)
    load_omni_transfer_config_for_model("model", str(bad))
    assert raw(*GATE) is gate
    load_omni_transfer_config_for_model("model", str(yaml(tmp_path, **ALL_ON)))
    assert _plans() == []
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")


@pytest.mark.upstream
@isolated("warm")
def test_unsupported_patch_refuses_the_start_under_fail(tmp_path: Path) -> None:
    """``on_unsupported: fail`` and a seam that moved: the reading raises, all is taken off, the gate is closed."""
    from omni_fastpath.install import RefusedError

    owner, name = holder("vllm_omni.engine.orchestrator", "OrchestratorBase._orchestration_loop")
    setattr(owner, name, lambda self, more: None)
    register()
    with pytest.raises(RefusedError, match="budgeted_drain is unsupported: a seam moved"):
        read(yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "on_unsupported": "fail"}))
    assert ours() == {"resolve_deploy_yaml", GATE[1]}
    with pytest.raises(RefusedError):
        _plans()
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ


@pytest.mark.upstream
@isolated("warm")
def test_open_gate_is_upstreams_own(tmp_path: Path) -> None:
    """Where nothing was ever refused the gate's slot is not touched."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    assert not is_ours(raw(*GATE))


@pytest.mark.upstream
@isolated("cold")
def test_reader_that_is_gone_is_told() -> None:
    """An upstream without the reader: every patch says so, and nothing else happens."""
    from types import ModuleType

    register()
    module = ModuleType(READER[0])
    from omni_fastpath import bootstrap

    bootstrap._wrap_reader(module)
    assert set(states().values()) == {"unsupported"}
    [file] = state_files()
    assert all("is gone" in patch["reason"] for patch in file["patches"].values())


# ---- Stages ----


def _report(to: Any) -> None:
    """What a stage process sees after registration."""
    register()
    register()
    upstream = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "vllm_omni"})
    files = [file for file in state_files() if file["pid"] == os.getpid()]
    to.send((states(), files, upstream))


def _stage(name: str = STAGE) -> tuple[dict[str, str], list[dict[str, Any]], list[str]]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender,), name=name)
    process.start()
    sender.close()
    answer: tuple[dict[str, str], list[dict[str, Any]], list[str]] = receiver.recv()
    process.join()
    assert process.exitcode == 0
    return answer


@pytest.mark.upstream
@pytest.mark.parametrize("name", [STAGE, "StageDiffusionProc", "EngineCore", "EngineCore_DP1", "VllmWorker-0"])
@isolated("warm")
def test_stage_gets_what_its_parent_resolved(tmp_path: Path, name: str) -> None:
    """A spawned stage reports the parent's patches as not applicable there, without importing upstream for it."""
    register()
    file = yaml(tmp_path, **ALL_ON)
    read(file)
    handed = json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])
    assert handed["pid"] == os.getpid()
    seen, files, imported = _stage(name)
    assert asked(seen) == dict.fromkeys(ALL_ON["fastpath"], "not_applicable")
    assert imported == []
    [shown] = files
    role = "worker" if name in ("StageDiffusionProc", "VllmWorker-0") else "stage"
    assert (shown["role"], shown["process_name"], shown["source"]) == (role, name, str(file))


@pytest.mark.upstream
@isolated("warm")
def test_stage_of_a_stock_server_is_stock(tmp_path: Path) -> None:
    """Without a block, and after one that is gone again, the stage has nothing to report and writes no file."""
    register()
    read(yaml(tmp_path))
    assert _stage() == ({}, [], [])
    read(yaml(tmp_path, "on.yaml", **ALL_ON))
    read(yaml(tmp_path, "off.yaml"))
    seen, files, _ = _stage()
    assert (set(seen.values()) <= {"off"}, files) == (True, [])


@pytest.mark.upstream
@isolated("warm")
def test_environment_alone_reaches_the_stages() -> None:
    """What the environment switched on in a parent that read no deploy YAML is handed to its stages too."""
    os.environ["OMNI_FASTPATH"] = "1"
    register()
    seen, [shown], _ = _stage()
    assert (asked(seen), shown["role"]) == (default_set("stage"), "stage")
    seen, [shown], imported = _stage("VllmWorker-0")
    assert (set(asked(seen).values()), shown["role"], imported) == ({"not_applicable"}, "worker", [])


@pytest.mark.upstream
@isolated("warm")
def test_stale_handoff_is_ignored(tmp_path: Path) -> None:
    """What another process left in the environment is nobody's configuration."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    handed = json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])
    for change in ({"started": handed["started"] - 1}, {"pid": 2**22 + 1}):
        os.environ["_OMNI_FASTPATH_HANDOFF"] = json.dumps({**handed, **change})
        assert _stage() == ({}, [], [])


@pytest.mark.upstream
@isolated("warm")
def test_handoff_of_an_ancestor_ends_at_a_server_of_its_own(tmp_path: Path) -> None:
    """A server that was started below another one and asks for nothing does not hand on what the other asked for."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    plain = yaml(tmp_path, "plain.yaml")
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_server_below, args=(plain, sender))
    process.start()
    assert receiver.recv() == ({}, [], [])
    process.join()


def _server_below(file: Path, to: Any) -> None:
    from omni_fastpath import bootstrap
    from omni_fastpath.ledger import LEDGER

    # As in a fresh process: a fork has its parent's state.
    bootstrap._publisher = None
    LEDGER.clear()
    read(file)
    to.send(_stage())


@pytest.mark.upstream
@isolated("warm")
def test_master_off_reaches_the_stages(tmp_path: Path) -> None:
    """Under ``OMNI_FASTPATH=0`` a stage shows that everything is off."""
    os.environ["OMNI_FASTPATH"] = "0"
    register()
    read(yaml(tmp_path, **ALL_ON))
    seen, files, imported = _stage()
    assert set(seen.values()) == {"off"}
    assert len(files) == 1
    assert imported == []


@isolated("cold", "serve", "model", "--omni", "--headless")
def _headless() -> None:
    from omni_fastpath.bootstrap import process_kind
    from omni_fastpath.declare import Process

    assert process_kind() is Process.HEADLESS


@pytest.mark.upstream
def test_headless_server_is_told_by_its_arguments() -> None:
    """``--headless`` on the command line makes another kind of process."""
    _headless()


@pytest.mark.upstream
@isolated("warm", "serve", "model", "--omni", "--headless")
def test_headless_server_reports_that_its_slots_are_elsewhere(tmp_path: Path) -> None:
    """A headless server resolves its own deploy YAML, installs nothing there, and hands on to its stages."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "not_applicable")
    assert ours() == {"resolve_deploy_yaml"}
    assert asked(_stage()[0]) == asked()
