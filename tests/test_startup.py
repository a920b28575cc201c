"""How the package comes into a process and what takes effect, on the real upstream; each case in its own process."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.process_role import HANDOFF
from omni_fastpath.startup import READER, START, start_problems
from tests.fakes.processes import isolated, process
from tests.fakes.registration import (
    ALL_ON,
    NOTHING,
    ON,
    STAGE,
    asked,
    declared,
    engine,
    headless,
    holder,
    is_ours,
    log,
    ours,
    raw,
    read,
    register,
    spawned,
    state_files,
    states,
    written,
    yaml,
)

SCHEDULER = ("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler.update_from_output")
"""The function that ``forward_gate`` wraps."""


def stock(file: Path) -> Any:
    """A deploy YAML as upstream alone reads it."""
    return raw(READER).__wrapped__(file)


# ---- Registration ----


@pytest.mark.parametrize(("variable", "packages"), [("1", {"omni_fastpath", "wrapt"}), ("0", {"omni_fastpath"})])
def test_registration_imports_the_standard_library_and_wrapt(variable: str, packages: set[str]) -> None:
    """Registering twice in a process without vLLM prints nothing and imports no other package."""
    script = "import sys; before = {*sys.modules}; from omni_fastpath.startup import register; register(); register()"
    run = process(sys.executable, "-c", f"{script}; print(*({{*sys.modules}} - before))", OMNI_FASTPATH=variable)
    found = set(run.stdout.split()) - {"__mp_main__"}  # what multiprocessing calls the main module
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names == packages
    assert run.stderr == ""
    assert "omni_fastpath.declare" not in found


@pytest.mark.parametrize("listed", [True, False])
@isolated("cold")
def test_an_allow_list_of_plugins(listed: bool) -> None:
    """With our name in ``VLLM_PLUGINS``, variables alone take effect. Without it, nothing of ours is in the process."""
    from vllm_omni.plugins import load_omni_general_plugins

    names = ["vllm_omni_register_models", *(["omni_fastpath"] if listed else [])]
    os.environ.update(VLLM_PLUGINS=",".join(names), OMNI_FASTPATH="1")
    load_omni_general_plugins()
    for module in ("vllm_omni.engine.orchestrator", "vllm_omni.engine.stage_runtime"):
        importlib.import_module(module)
    assert engine(None) == []
    assert asked() == (declared("server") if listed else {})
    assert bool(ours()) is listed
    assert [file["source"] for file in state_files()] == ["environment"] * listed


@isolated("cold", "serve", "model")
def test_plain_vllm_is_plain() -> None:
    """``vllm serve`` without ``--omni`` gets no patch, whatever the variables are."""
    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_LEAN_PROCESSING="1")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    client = ("vllm.v1.engine.core_client", "AsyncMPClient._ensure_output_queue_task")  # of `lean_processing`
    for module in (client[0], "vllm.v1.serial_utils", "vllm.v1.engine.async_llm"):
        importlib.import_module(module)
    owner, _ = holder(client)
    assert not is_ours(raw(client))
    assert not hasattr(owner, "get_output_nowait")
    assert (asked(), state_files()) == ({}, [])
    assert "vllm_omni.engine.orchestrator" not in sys.modules


# ---- Nothing asked for ----


@isolated("cold")
def test_what_asks_for_nothing_leaves_nothing(tmp_path: Path) -> None:
    """Without a block or with one that is off, the file is read as stock reads it and nothing else changes.

    vLLM's loaders register twice, and the reader is wrapped once. A misspelt variable or key is one warning.
    """
    os.environ["OMNI_FASTPATH_BUDGETED_DRIAN"] = "1"
    messages = log()
    register()
    register()
    assert is_ours(raw(READER))
    assert not is_ours(raw(READER).__wrapped__)
    for file in (yaml(tmp_path, "a.yaml", fastpaht=True), yaml(tmp_path, "b.yaml", fastpath=False)):
        assert read(file) == stock(file)
        assert engine(file) == []
    assert engine(None) == []
    assert headless(None) is None
    meant = ("OMNI_FASTPATH_BUDGETED_DRAIN", "fastpath")
    assert [f"did you mean {name!r}?" in message for name, message in zip(meant, messages, strict=True)] == [True] * 2
    assert (ours(), states(), state_files()) == (NOTHING, {}, [])
    assert HANDOFF not in os.environ
    assert "pluggy" not in {name for name in sys.modules if name.startswith("omni_fastpath.hooks")}


@isolated("cold", "serve", "model", "--omni")
def test_off_touches_nothing_and_is_shown(tmp_path: Path) -> None:
    """``OMNI_FASTPATH=0`` writes no slot, validates nothing, and is the reason in the state file."""
    os.environ.update(OMNI_FASTPATH="0", OMNI_FASTPATH_NO_SUCH="1", OMNI_FASTPATH_BUDGETED_DRAIN="maybe")
    register()
    file = yaml(tmp_path, fastpath={"no_such_patch": 1})
    read(file)
    assert engine(file) == engine(None) == []
    assert (ours(), is_ours(raw(START))) == (set(), False)
    [shown] = state_files()
    assert {(patch["state"], patch["reason"]) for patch in shown["patches"].values()} == {("off", "OMNI_FASTPATH=0")}
    assert set(spawned()[0].values()) == {"off"}


# ---- A function of the start-up that moved ----


@pytest.mark.parametrize("slot", [READER, START])
@isolated("warm")
def test_a_function_that_is_gone_is_told(tmp_path: Path, slot: tuple[str, str]) -> None:
    """One line of the log says that nothing is installed, and the server runs as stock."""
    modules = [importlib.import_module(name) for name in (slot[0], "vllm_omni.engine.stage_runtime")]
    for module in modules:
        vars(module).pop(slot[1], None)
    messages = log()
    register()
    [message] = messages
    assert message.startswith("omni-fastpath: NO PATCH IS INSTALLED if settings ask for one: ")
    assert ":".join(slot) in message
    assert start_problems()[0].startswith(":".join(slot))
    assert (ours() - NOTHING, states(), state_files()) == (set(), {}, [])


@pytest.mark.parametrize("words", [["--omni"], []])
@isolated("cold", "serve", "model")
def test_a_module_that_is_gone_is_told(words: list[str]) -> None:
    """``vllm serve --omni`` says at once that a module of the start-up is gone. ``vllm serve`` has no stages."""
    from omni_fastpath import startup

    sys.argv += words
    startup.START = START[0].replace("stage_init_utils", "gone"), START[1]
    messages = log()
    register()
    assert [startup.START[0] in message for message in messages] == [True] * len(words)


# ---- What takes effect ----


@isolated("cold")
def test_a_chain_takes_effect_before_the_stages(tmp_path: Path) -> None:
    """Patches are installed when the engine starts, not when the file is read, and variables override values.

    Upstream's rule counts: the block replaces that of its base.
    """
    from vllm_omni.config.config_factory import load_deploy_config

    from omni_fastpath.ledger import LEDGER

    os.environ.update(OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS="3", OMNI_FASTPATH_SUBMISSION_ERRORS="0")
    register()
    base = json.dumps({"forward_gate": True, "budgeted_drain": {"max_items": 5}})
    odd = "x: {1: 0.5, 1: 0.7, true: 1, 'true': 2}\n"
    (tmp_path / "base.yaml").write_text(f"{odd}stages: [{{stage_id: 0}}]\nfastpath: {base}\n", encoding="utf-8")
    file = yaml(tmp_path, base_config="base.yaml", fastpath={"budgeted_drain": {"max_time_us": 700}})
    load_deploy_config(file)  # imported by others before we came
    assert read(file) == stock(file)
    assert (ours(), states()) == (NOTHING, {})
    assert engine(file) == []
    options: Any = LEDGER.named("budgeted_drain").options
    assert (options.max_items, options.max_time_us) == (3, 700)
    assert ours() == NOTHING | written("budgeted_drain", "nonblocking_dequeue")
    [shown] = state_files()
    assert (shown["source"], shown["role"]) == (str(file), "server")
    assert {name: patch["state"] for name, patch in shown["patches"].items()} == states()


@isolated("warm")
def test_a_start_writes_the_state_file_alone(tmp_path: Path) -> None:
    """With every patch on, a start opens no socket, starts no process and writes only state files."""
    from omni_fastpath import state
    from omni_fastpath.patches import PATCHES

    register()
    file = yaml(tmp_path, fastpath=dict.fromkeys((patch.name for patch in PATCHES), True))
    sys.dont_write_bytecode = True
    seen: list[tuple[str, Any]] = []
    sys.addaudithook(lambda event, arguments: seen.append((event, arguments)))
    read(file)
    assert engine(file) == []
    events = tuple(seen)
    assert asked() == declared("server", every=True)
    reaching_out = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "pickle.")
    assert not {event for event, _ in events if event.startswith(reaching_out)}
    opened = (how for event, how in events if event == "open" and isinstance(how[0], str))
    written = {Path(name).parent for name, _, flags in opened if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)}
    assert written == {state.folder()}


# ---- What is refused ----


@isolated("warm")
def test_a_bad_variable_is_refused(tmp_path: Path) -> None:
    """Registration ignores it, and each kind of start is refused."""
    from omni_fastpath.config import ConfigError

    os.environ[variable := "OMNI_FASTPATH_BUDGETED_DRAIN__MAX_ITEMS"] = "\udcff"
    messages = log()
    register()
    assert messages == []
    file = yaml(tmp_path)
    starts: list[Callable[[], Any]] = [lambda: read(file), lambda: engine(None), lambda: headless(None)]
    for start in starts:
        with pytest.raises(ConfigError, match=variable):
            start()
    assert sum(f"refused: {variable}" in message for message in messages) == 3
    assert ours() == NOTHING
    sys.argv[1:] = ["serve", "model", "--omni"]
    with pytest.raises(SystemExit, match=variable):  # logged once, without a traceback
        read(file)
    assert sum(variable in message for message in messages) == 3


@isolated("warm", "serve", "model", "--omni")
def test_a_refusal_off_the_main_thread_is_one_line(tmp_path: Path) -> None:
    """Upstream's orchestrator thread ends a refused ``vllm serve`` with one line and code 1, and logs no traceback."""
    register()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit  # ends the thread alone

    setattr(*holder(SCHEDULER), lambda self, more: None)
    refused = yaml(tmp_path, fastpath={"forward_gate": True, "on_unsupported": "fail"})
    messages, shown, real = log(), io.StringIO(), os._exit
    os._exit = leave  # type: ignore[assignment]
    with contextlib.redirect_stderr(shown):
        thread = threading.Thread(target=engine, args=(refused,))
        thread.start()
        thread.join()
    os._exit = real
    [line] = shown.getvalue().splitlines()
    assert line.startswith("omni-fastpath: start refused: fastpath.on_unsupported is 'fail' and forward_")
    assert (codes, [each for each in messages if "refused" in each]) == ([1], [])


# ---- Errors of ours ----


BROKEN = ("config:block_of", "config:Resolved.to_json", "install:apply")
"""What of ours raises."""


@pytest.mark.parametrize("where", [*BROKEN, "pydantic"])
@isolated("warm")
def test_an_error_of_ours(tmp_path: Path, where: str) -> None:
    """After an internal error an engine starts as stock with a message, but not under ``fail`` if that is known."""
    from omni_fastpath.process_role import RefusedError

    def breaks(*_: object, **__: object) -> Any:
        raise RuntimeError("it broke")

    register()
    if where in BROKEN:
        module, _, path = where.partition(":")
        setattr(*holder((f"omni_fastpath.{module}", path)), breaks)
    else:
        sys.modules[where] = None  # type: ignore[assignment]
    assert engine(yaml(tmp_path, "plain.yaml")) == []
    messages = log()
    assert engine(yaml(tmp_path, "warn.yaml", **ALL_ON)) == []
    assert any("the configuration cannot take effect" in message for message in messages)
    if where in BROKEN:
        assert {name: states()[name] for name in ON} == dict.fromkeys(ON, "failed")
        [shown] = state_files()
        assert "an internal error of omni-fastpath: RuntimeError(" in shown["patches"]["budgeted_drain"]["reason"]
    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_ON_UNSUPPORTED="fail")
    knows = where in ("config:Resolved.to_json", "install:apply")
    refusing = pytest.raises(RefusedError, match="is 'fail' and there was an internal")
    with refusing if knows else contextlib.nullcontext():
        engine(None)
    assert HANDOFF not in os.environ or where == "config:block_of"


# ---- Several engines in one process ----


@pytest.mark.parametrize("block", [{"budgeted_drian": True}, {"forward_gate": True, "on_unsupported": "fail"}])
@isolated("warm")
def test_a_refused_engine_changes_nothing_of_one_that_runs(tmp_path: Path, block: dict[str, Any]) -> None:
    """A refused second engine changes neither the installed patches nor what the first one's stages get.

    The function that ``stage_runtime``, imported before us, has by name is wrapped too, each once.
    """
    from omni_fastpath.config import ConfigError
    from omni_fastpath.process_role import RefusedError

    importlib.import_module("vllm_omni.engine.stage_runtime")
    register()
    assert engine(yaml(tmp_path, "one.yaml", **ALL_ON)) == []
    assert not is_ours(raw(START).__wrapped__)
    handed = os.environ[HANDOFF]
    setattr(*holder(SCHEDULER), lambda self, more: None)
    with pytest.raises((ConfigError, RefusedError)):
        engine(yaml(tmp_path, "two.yaml", fastpath={**ALL_ON["fastpath"], "budgeted_drain": {}, **block}))
    assert os.environ[HANDOFF] == handed
    assert ({name: states()[name] for name in ON}, ours()) == (ON, NOTHING | written(*ON))


@isolated("warm")
def test_engines_share_what_is_installed(tmp_path: Path) -> None:
    """Engines of a process share patches and values, and each difference is one warning.

    The stages of an engine that asks for nothing get what the process keeps.
    """
    from omni_fastpath.ledger import LEDGER

    def stages_get() -> dict[str, Any]:
        enabled: dict[str, Any] = json.loads(json.loads(os.environ[HANDOFF])["resolved"])["enabled"]
        return enabled

    register()
    first = {"budgeted_drain": {"max_items": 3}, "forward_gate": True}
    assert engine(yaml(tmp_path, "one.yaml", fastpath=first)) == []
    handed = stages_get()
    messages = log()
    for file in (None, yaml(tmp_path, "three.yaml")):
        assert engine(file) == []
        assert stages_get() == handed
    assert sum("stays on" in message for message in messages) == len({"nonblocking_dequeue", "budgeted_drain"})
    second = {"budgeted_drain": {"max_items": 9}, "save_queue_cap": {"max_tasks": 7}}
    assert engine(yaml(tmp_path, "four.yaml", fastpath=second)) == []
    assert stages_get().keys() == {"nonblocking_dequeue", "budgeted_drain", "save_queue_cap"}
    options: Any = LEDGER.named("budgeted_drain").options
    assert options.max_items == 3


# ---- The stages ----


@isolated("warm")
def test_stages_get_what_their_server_resolved(tmp_path: Path) -> None:
    """A stage and its worker get the server's configuration without importing upstream, whatever the file's name."""
    register()
    file = yaml(tmp_path, "café.yaml", **ALL_ON)
    assert engine(file) == []
    assert json.loads(os.environ[HANDOFF])["parent"] == os.getpid()
    for below, role in ((None, "stage"), ("VllmWorker-0", "worker")):
        seen, [shown], imported = spawned(STAGE, below)
        assert asked(seen) == dict.fromkeys(ON, "not_applicable")
        assert (shown["role"], shown["process_name"], imported) == (role, below or STAGE, [])
        assert shown["source"] == str(file)


@isolated("warm")
def test_a_handoff_of_no_ancestor_is_ignored(tmp_path: Path) -> None:
    """A variable of another process is ignored, and an unreadable one of an ancestor makes all patches failed."""
    register()
    assert engine(yaml(tmp_path, **ALL_ON)) == []
    handed = json.loads(os.environ[HANDOFF])
    os.environ[HANDOFF] = json.dumps({**handed, "parent": 2**22 + 1})
    assert spawned() == ({}, [], [])
    os.environ[HANDOFF] = json.dumps({**handed, "resolved": '{"enabled": {"flute": {}}}'})
    seen, [shown], _ = spawned()
    assert set(seen.values()) == {"failed"}
    assert "the parent's configuration cannot take effect" in shown["patches"]["budgeted_drain"]["reason"]


@isolated("warm")
def test_a_headless_server_hands_on(tmp_path: Path) -> None:
    """A headless server installs nothing, and its stages get the configuration of its deploy YAML."""
    register()
    headless(yaml(tmp_path, fastpath={"forward_gate": True}))
    assert asked() == {"forward_gate": "not_applicable"}
    [shown] = state_files()
    assert (shown["role"], ours()) == ("headless", NOTHING)
    assert json.loads(json.loads(os.environ[HANDOFF])["resolved"])["enabled"].keys() == {"forward_gate"}
