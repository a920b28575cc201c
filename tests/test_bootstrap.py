"""How the package comes into a process, on the real upstream; each case in a process of its own."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import ROOT, isolated

STAGE = "StageEngineCoreProc_stage0_replica0"
READER = ("vllm_omni.config.stage_config", "resolve_deploy_yaml")
GATE = ("vllm_omni.engine.stage_runtime", "StageRuntime._build_logical_stage_init_plans")
HEADLESS_GATE = ("vllm_omni.engine.stage_engine_startup", "get_headless_replica_devices")
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
    """Every slot of a patch, and the reader's, that holds something of ours."""
    from omni_fastpath.patches import PATCHES

    keys = {READER}
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
    [
        ("OMNI_FASTPATH", "perhaps"),
        ("OMNI_FASTPATH_BUDGETED_DRAIN", "maybe"),
        ("OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS", "-1"),
        ("OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS", "1_"),
        ("OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS", "9" * 5000),
        ("OMNI_FASTPATH_BUDGETED_DRAIN__ORDER", "\udcff"),
    ],
    ids=["master", "switch", "below", "underscore", "digits", "byte"],
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
    assert ours() == {"resolve_deploy_yaml"}
    assert set(states().values()) == {"failed"}
    [shown] = state_files()
    assert all(variable in patch["reason"] for patch in shown["patches"].values())


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
    assert ours() == {"resolve_deploy_yaml"}


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
    assert ours() == {"resolve_deploy_yaml"}
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


def _log() -> list[str]:
    """What our logger says from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.omni_fastpath").addHandler(handler)
    return messages


def _break(where: str) -> None:
    """Make something of ours, or what it stands on, raise."""
    from omni_fastpath import bootstrap, config, deployyaml, handoff, install, processid

    def breaks(*_: object, **__: object) -> Any:
        raise RuntimeError("line 'btime' not found in /proc/stat")

    owner, name = {
        "processid": (processid, "boot_id"),
        "handoff": (handoff, "export"),
        "apply": (install, "apply"),
        "resolve": (config, "resolve"),
        "read": (deployyaml, "blocks_of"),
        "publish": (bootstrap, "_publish"),
    }[where]
    setattr(owner, name, breaks)


@pytest.mark.upstream
@pytest.mark.parametrize("where", ["processid", "handoff", "apply", "resolve", "read"])
@isolated("warm")
def test_own_error_refuses_under_fail(tmp_path: Path, where: str) -> None:
    """An error of ours under ``on_unsupported: fail``: the reading raises, and so does the gate; no slot stays."""
    register()
    _break(where)
    file = yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "forward_gate": True, "on_unsupported": "fail"})
    with pytest.raises(RuntimeError, match=r"on_unsupported is 'fail' and .*btime"):
        read(file)
    assert ours() == {"resolve_deploy_yaml"}
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ
    with pytest.raises(RuntimeError, match="btime"):
        _engine(file)


@pytest.mark.upstream
@pytest.mark.parametrize("where", ["processid", "handoff", "apply", "resolve", "read"])
@isolated("warm")
def test_own_error_is_failed_under_warn(tmp_path: Path, where: str) -> None:
    """Under ``warn`` the server starts, log and ledger say what failed, and no stage takes up half of it."""
    register()
    messages = _log()
    _break(where)
    file = yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "forward_gate": True})
    assert read(file) == raw(*READER).__wrapped__(file)
    told = where in ("processid", "handoff")  # the server's own patches are applied, and only the stages do not know
    assert states()["forward_gate"] == "failed"
    assert {states()[name] for name in ALL_ON["fastpath"]} == {"applied" if told else "failed"}
    assert any("btime" in message for message in messages)
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ or where == "apply"
    if where != "processid":  # which the state file needs too
        [shown] = state_files()
        assert "btime" in shown["patches"]["forward_gate"]["reason"]
    assert _engine(file) == []


@pytest.mark.upstream
@pytest.mark.parametrize("where", ["processid", "handoff", "apply", "resolve", "read", "publish"])
@isolated("warm")
def test_own_error_leaves_alone_who_asked_for_nothing(tmp_path: Path, where: str) -> None:
    """Whatever of ours is broken, a file without the key is read as stock reads it, and its engine starts."""
    register()
    _break(where)
    file = yaml(tmp_path)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert (_engine(file), states()) == ([], {})


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("variable", "block", "refused"),
    [
        (None, {"on_unsupported": "fail"}, True),
        (None, {}, False),
        ("fail", {}, True),
        ("warn", {"on_unsupported": "fail"}, False),
        ("?", {"on_unsupported": "fail"}, False),
    ],
)
@isolated("warm")
def test_on_unsupported_that_we_could_not_read(
    tmp_path: Path, variable: str | None, block: dict[str, Any], refused: bool
) -> None:
    """Where our error comes before the configuration, the plain word of the variable or of the merged block decides."""
    if variable is not None:
        os.environ["OMNI_FASTPATH_ON_UNSUPPORTED"] = variable
    register()
    _break("resolve")
    yaml(tmp_path, fastpath={**ALL_ON["fastpath"], **block})
    file = yaml(tmp_path, "overlay.yaml", base_config="deploy.yaml")
    if refused:
        with pytest.raises(RuntimeError, match="btime"):
            read(file)
    else:
        read(file)
    assert set(states().values()) == {"failed"}


@pytest.mark.upstream
@isolated("warm")
def test_dependency_of_ours_that_is_broken(tmp_path: Path) -> None:
    """A package of ours that cannot be imported: whoever asked for nothing is served, ``fail`` refuses."""
    register()
    for name in ("omni_fastpath.config", "omni_fastpath.install", "omni_fastpath.patches"):
        sys.modules.pop(name, None)
    sys.modules["psutil"] = None  # type: ignore[assignment]
    sys.modules["pydantic"] = None  # type: ignore[assignment]
    assert read(yaml(tmp_path))["stages"]
    assert read(yaml(tmp_path, **ALL_ON))["stages"]
    with pytest.raises(RuntimeError, match="on_unsupported is 'fail'"):
        read(yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "on_unsupported": "fail"}))


# ---- Names that are nobody's ----

KUBERNETES = {
    "OMNI_FASTPATH_SERVICE_HOST": "10.0.0.7",
    "OMNI_FASTPATH_SERVICE_PORT": "8091",
    "OMNI_FASTPATH_SERVICE_PORT_HTTP": "8091",
    "OMNI_FASTPATH_PORT": "tcp://10.0.0.7:8091",
    "OMNI_FASTPATH_PORT_8091_TCP": "tcp://10.0.0.7:8091",
    "OMNI_FASTPATH_PORT_8091_TCP_PROTO": "tcp",
    "OMNI_FASTPATH_PORT_8091_TCP_PORT": "8091",
    "OMNI_FASTPATH_PORT_8091_TCP_ADDR": "10.0.0.7",
    "OMNI_FASTPATH_API_PORT_53_UDP_ADDR": "10.0.0.8",
}
"""What Kubernetes puts into every pod beside a Service named ``omni-fastpath``, and one named ``omni-fastpath-api``."""


@pytest.mark.upstream
@pytest.mark.parametrize("block", [{}, ALL_ON])
@isolated("warm")
def test_kubernetes_service_of_our_name(tmp_path: Path, block: dict[str, Any]) -> None:
    """Its variables stop no server, stock or not, and are not spoken of."""
    os.environ.update(KUBERNETES)
    messages = _log()
    register()
    file = yaml(tmp_path, **block)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert _engine(file) == []
    assert asked() == (dict.fromkeys(ALL_ON["fastpath"], "applied") if block else {})
    assert not any(name in message for name in KUBERNETES for message in messages)
    assert is_ours(raw(*GATE)) is bool(block)


@pytest.mark.upstream
@pytest.mark.parametrize("without_yaml", [False, True])
@isolated("warm")
def test_unknown_variable_is_told_where_nothing_is_asked(tmp_path: Path, without_yaml: bool) -> None:
    """A misspelt variable beside nothing else does not stop a server: one warning, however often the YAML is read."""
    os.environ["OMNI_FASTPATH_BUDGETED_DRIAN"] = "1"
    messages = _log()
    register()
    file = None if without_yaml else yaml(tmp_path)
    for _ in range(3):
        assert _engine(file) == []
    [message] = messages
    assert "did you mean 'OMNI_FASTPATH_BUDGETED_DRAIN'?" in message
    assert (ours(), states(), state_files()) == ({"resolve_deploy_yaml"}, {}, [])


@pytest.mark.upstream
@pytest.mark.parametrize("asks", ["yaml", "variable"])
@isolated("warm")
def test_unknown_variable_refuses_where_something_is_asked(tmp_path: Path, asks: str) -> None:
    """Beside a block or a variable that switches something on it would be missed in silence: refused."""
    from omni_fastpath.config import ConfigError

    os.environ["OMNI_FASTPATH_BUDGETED_DRIAN"] = "1"
    if asks == "variable":
        os.environ["OMNI_FASTPATH"] = "1"
    register()
    file = yaml(tmp_path, **(ALL_ON if asks == "yaml" else {}))
    with pytest.raises(ConfigError, match="OMNI_FASTPATH_BUDGETED_DRIAN"):
        read(file)
    with pytest.raises(ConfigError, match="OMNI_FASTPATH_BUDGETED_DRIAN"):
        _engine(file)
    assert ours() == {"resolve_deploy_yaml"}


# ---- Files that are upstream's ----


@pytest.mark.upstream
@pytest.mark.parametrize(
    "content",
    [
        "stages:\n- stage_id: 0\n  engine_args:\n    logit_bias: {1: 0.5, 1: 0.7}\n",
        "stages: [{stage_id: 0, x: {true: 1, 'true': 2}}]\n",
        "stages: [{stage_id: 0, x: {1: a, '1': b, 1.0: c}}]\n",
        "stages: [{stage_id: 0, x: !!python/object/apply:pathlib.Path [a]}]\n",
        "stages: [{stage_id: 0, runtime: {fastpath: true}}]\n",
        "stages: [{stage_id: 0, fastpath: true}]\n",
        "platforms: {cuda: {fastpath: 1}}\n",
        "a: &a {p: 1}\nb: &b {q: 2}\nc:\n  <<: *a\n  <<: *b\n",
        "x: {null: 1, 2026-01-01: 2}\n",
        "n: 3\nx: ${n}\ny: ${oc.env:HOME}\nz: ???\n",
        "x: [1e3, 1:30, 0o17, 0x1F, .inf, .nan]\n",
        "x: !!binary aGVsbG8=\n",
        "\ufeffstages: []\n",
        "hello\n",
        "",
        "- a\n",
        "base_config: 3\n",
        "base_config: s.yaml\n",
        "base_config: gone.yaml\n",
        "base_config: ''\n",
        "a: [\n",
    ],
)
@isolated("warm")
def test_file_without_the_key_is_upstreams(tmp_path: Path, content: str) -> None:
    """Without a top-level ``fastpath`` what upstream makes of a file, be it an error, is what we make of it."""
    register()
    file = tmp_path / "s.yaml"
    file.write_text(content, encoding="utf-8")

    def outcome(reader: Any) -> str:
        try:
            return repr(reader(file))
        except RecursionError:
            return "RecursionError"
        except Exception as error:
            return f"{type(error)}: {error}"

    assert outcome(read) == outcome(raw(*READER).__wrapped__)
    assert (ours(), states()) == ({"resolve_deploy_yaml"}, {})


@pytest.mark.upstream
@isolated("warm")
def test_file_with_the_key_is_read_as_upstream_reads_it(tmp_path: Path) -> None:
    """What only upstream's reader takes stands beside a block, in the file and in its base: the block takes effect."""
    register()
    odd = "x: {1: 0.5, 1: 0.7, true: 1, 'true': 2}\ny: !!python/object/apply:pathlib.Path [a]\n"
    (tmp_path / "base.yaml").write_text(f"{odd}fastpath: {{final_output_wakeup: true}}\n", encoding="utf-8")
    file = tmp_path / "s.yaml"
    file.write_text(f"base_config: base.yaml\n{odd}fastpath: {{nonblocking_dequeue: true}}\n", encoding="utf-8")
    result = read(file)
    assert asked() == dict.fromkeys(("final_output_wakeup", "nonblocking_dequeue"), "applied")
    assert result == raw(*READER).__wrapped__(file)  # which reads its base through ours


@pytest.mark.upstream
@isolated("warm")
def test_file_that_only_upstream_could_read(tmp_path: Path) -> None:
    """A file that is gone when we look: not refused, and its patches say that it could not be read."""
    register()
    reader = raw(*READER)
    file = yaml(tmp_path, **ALL_ON)
    taken = reader.__wrapped__(file)
    from omni_fastpath import bootstrap

    file.unlink()
    bootstrap._judge(str(file), taken)
    assert set(states().values()) == {"failed"}
    [shown] = state_files()
    assert "cannot be read" in shown["patches"]["budgeted_drain"]["reason"]


# ---- The gate ----


def _engine(file: Path | None) -> Any:
    """Plan an engine's stages as upstream does before it spawns them: it reads the YAML again, and drops exceptions."""
    kind = sys.modules[GATE[0]].StageRuntime
    runtime = kind.__new__(kind)
    runtime._stage_configs, runtime._model, runtime._config_path = [], "model", str(file) if file else None
    return runtime._prepare_stage_plans()


@pytest.mark.upstream
@isolated("warm")
def test_swallowed_refusal_is_raised_before_the_spawn(tmp_path: Path) -> None:
    """Where upstream swallows the reader's error, its next step raises it; a good file passes."""
    from omni_fastpath.config import ConfigError

    register()
    bad = yaml(tmp_path, "bad.yaml", fastpath={"budgeted_drian": True})
    for _ in range(2):
        with pytest.raises(ConfigError, match="budgeted_drian"):
            _engine(bad)
    gate = raw(*GATE)
    assert _engine(yaml(tmp_path, **ALL_ON)) == []
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
    assert _engine(None) == []
    assert _engine(yaml(tmp_path)) == []
    with pytest.raises(ConfigError):
        _engine(bad)
    assert _engine(yaml(tmp_path, "bad.yaml", **ALL_ON)) == []


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
        _engine(file)
    assert "_OMNI_FASTPATH_HANDOFF" not in os.environ


@pytest.mark.upstream
@isolated("warm")
def test_gate_is_upstreams_own_where_nothing_is_asked(tmp_path: Path) -> None:
    """Without a block and without a variable the gate's slots are not touched."""
    register()
    assert _engine(yaml(tmp_path)) == []
    assert not is_ours(raw(*GATE))
    importlib.import_module(HEADLESS_GATE[0])
    assert not is_ours(raw(*HEADLESS_GATE))


# ---- Without a deploy YAML ----


def _headless_devices() -> Any:
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
    messages = _log()
    register()
    assert (messages, states(), state_files()) == ([], {}, [])
    with pytest.raises(ConfigError, match=f"OMNI_FASTPATH_BUDGETED_DRAIN: found {value!r}"):
        _headless_devices() if headless else _engine(None)
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
    assert _engine(None) == []
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
        _engine(None)
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
        _headless_devices()
    else:
        _engine(None)
    assert states()["forward_gate"] == "not_applicable"
    assert "forward_gate" in json.loads(json.loads(os.environ["_OMNI_FASTPATH_HANDOFF"])["resolved"])["enabled"]


# ---- Several engines in one process ----


class _Running:
    """An engine: its stages are planned in the thread that then runs its orchestrator."""

    def __init__(self, file: Path | None) -> None:
        self._end = threading.Event()
        self._planned = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(file,))
        self._thread.start()
        self._planned.wait()

    def _run(self, file: Path | None) -> None:
        try:
            _engine(file)
        except Exception as error:
            self.error = error
        self._planned.set()
        if self.error is None:
            self._end.wait()

    def shut_down(self) -> None:
        """End it."""
        self._end.set()
        self._thread.join()


@pytest.mark.upstream
@isolated("warm")
def test_engine_keeps_its_patches_when_another_asks_for_none(tmp_path: Path) -> None:
    """B's YAML has no block: nothing is taken off A, whose front end has not even waited yet, until A ends."""
    register()
    first = _Running(yaml(tmp_path, "one.yaml", **ALL_ON))
    second = _Running(yaml(tmp_path, "two.yaml"))
    assert (first.error, second.error) == (None, None)
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "applied")
    assert ours() == {"resolve_deploy_yaml"} | EVERYTHING
    [shown] = state_files()
    assert "an engine that asked for it is running" in shown["patches"]["final_output_wakeup"]["reason"]
    first.shut_down()
    read(yaml(tmp_path, "three.yaml"))
    assert ours() == {"resolve_deploy_yaml"}
    second.shut_down()


@pytest.mark.upstream
@pytest.mark.parametrize("block", [{"budgeted_drian": True}, {**ALL_ON["fastpath"], "on_unsupported": "fail"}])
@isolated("warm")
def test_refused_engine_leaves_the_running_one_alone(tmp_path: Path, block: dict[str, Any]) -> None:
    """B is refused, bad block or a patch that cannot serve: A keeps slots, states and values, and C starts."""
    from omni_fastpath.ledger import LEDGER

    register()
    own = {**ALL_ON["fastpath"], "budgeted_drain": {"max_items": 3}}
    first = _Running(yaml(tmp_path, "one.yaml", fastpath=own))
    if "on_unsupported" in block:
        owner, name = holder("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler.update_from_output")
        setattr(owner, name, lambda self, more: None)
        block = {**block, "budgeted_drain": {"max_items": 5}, "forward_gate": True}
    second = _Running(yaml(tmp_path, "two.yaml", fastpath=block))
    assert second.error is not None
    third = _Running(None)
    fourth = _Running(yaml(tmp_path, "four.yaml"))
    assert (third.error, fourth.error) == (None, None)
    assert ours() == {"resolve_deploy_yaml"} | EVERYTHING
    assert {name: states()[name] for name in ALL_ON["fastpath"]} == dict.fromkeys(ALL_ON["fastpath"], "applied")
    options: Any = LEDGER.named("budgeted_drain").options
    assert options.max_items == 3
    for engine in (first, third, fourth):
        engine.shut_down()


@pytest.mark.upstream
@isolated("cold")
def test_reader_that_is_gone_is_told() -> None:
    """An upstream without the reader: where nobody asked one line at most, and no state; variables work on."""
    from types import ModuleType

    messages = _log()
    register()
    from omni_fastpath import bootstrap

    module = ModuleType(READER[0])
    bootstrap._wrap_reader(module)
    logging.getLogger("vllm.omni_fastpath").setLevel(logging.INFO)
    assert (states(), state_files()) == ({}, [])
    messages.clear()
    bootstrap._wrap_reader(module)
    assert messages == []
    sys.argv[1:] = ["serve", "model", "--omni"]
    bootstrap._wrap_reader(module)
    [message] = messages
    assert "is gone" in message


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


@pytest.mark.upstream
@pytest.mark.parametrize("depth", [1, 2])
@isolated("warm")
def test_plain_server_below_an_omni_one_is_plain(tmp_path: Path, depth: int) -> None:
    """A plain ``vllm serve`` that a process with Omni starts takes nothing up, and its engines do not either."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    script = "from tests.test_bootstrap import plain_server; plain_server()"
    command = [sys.executable, "-c", script]
    if depth == 2:  # by way of a shell, or a launcher
        command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r}, check=True)"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "({}, [], [])"


def plain_server() -> None:
    """``vllm serve`` without ``--omni``: registers as every vLLM process does, reads no deploy YAML, and spawns."""
    register()
    print(_stage("EngineCore"))  # noqa: T201


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


@pytest.mark.upstream
@pytest.mark.parametrize("in_file", [False, True])
@isolated("cold")
def test_headless_server_is_told_by_its_arguments(tmp_path: Path, in_file: bool) -> None:
    """``--headless``, on the command line or in the file that ``--config`` names, makes another kind of process."""
    from omni_fastpath.bootstrap import process_kind
    from omni_fastpath.declare import Process

    config = tmp_path / "config.yaml"
    config.write_text("headless: true\nport: 1234\n")
    sys.argv[1:] = ["serve", "model", "--omni", *(["--config", str(config)] if in_file else ["--headless"])]
    assert process_kind() is Process.HEADLESS


@pytest.mark.upstream
@isolated("warm", "serve", "model", "--omni", "--headless")
def test_headless_server_reports_that_its_slots_are_elsewhere(tmp_path: Path) -> None:
    """A headless server resolves its own deploy YAML, installs nothing there, and hands on to its stages."""
    register()
    read(yaml(tmp_path, **ALL_ON))
    assert asked() == dict.fromkeys(ALL_ON["fastpath"], "not_applicable")
    assert ours() == {"resolve_deploy_yaml"}
    assert asked(_stage()[0]) == asked()
