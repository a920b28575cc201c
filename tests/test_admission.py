"""What may start and what is refused, on the real upstream; each case in a process of its own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import isolated
from tests.fakes.registration import (
    ALL_ON,
    DEQUEUE,
    DRAIN,
    EVERYTHING,
    GATE,
    READER,
    WAKEUP,
    asked,
    default_set,
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
@isolated("cold")
def test_a_yaml_decides_although_it_imports_the_modules_itself(tmp_path: Path) -> None:
    """With patches on in the environment too: what their install imports does not let the environment decide again."""
    from omni_fastpath.ledger import LEDGER

    os.environ["OMNI_FASTPATH"] = "1"
    register()
    file = yaml(tmp_path, fastpath={**ALL_ON["fastpath"], "budgeted_drain": {"max_items": 3}})
    read(file)
    options: Any = LEDGER.named("budgeted_drain").options
    assert (options.max_items, asked()) == (3, dict.fromkeys(ALL_ON["fastpath"], "applied"))
    [shown] = state_files()
    assert shown["source"] == str(file)


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


# ---- Errors of ours ----


def _break(where: str) -> None:
    """Make something of ours, or what it stands on, raise."""
    from omni_fastpath import config, deploy_yaml, handoff, install, processid
    from omni_fastpath.activation import Activation

    def breaks(*_: object, **__: object) -> Any:
        raise RuntimeError("line 'btime' not found in /proc/stat")

    owner, name = {
        "processid": (processid, "_stat"),
        "handoff": (handoff, "export"),
        "apply": (install, "apply"),
        "resolve": (config, "resolve"),
        "read": (deploy_yaml, "blocks_of"),
        "publish": (Activation, "_publish"),
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
        engine(file)


@pytest.mark.upstream
@pytest.mark.parametrize("where", ["processid", "handoff", "apply", "resolve", "read"])
@isolated("warm")
def test_own_error_is_failed_under_warn(tmp_path: Path, where: str) -> None:
    """Under ``warn`` the server starts, log and ledger say what failed, and no stage takes up half of it."""
    register()
    messages = log()
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
    assert engine(file) == []


@pytest.mark.upstream
@pytest.mark.parametrize("where", ["processid", "handoff", "apply", "resolve", "read", "publish"])
@isolated("warm")
def test_own_error_leaves_alone_who_asked_for_nothing(tmp_path: Path, where: str) -> None:
    """Whatever of ours is broken, a file without the key is read as stock reads it, and its engine starts."""
    register()
    _break(where)
    file = yaml(tmp_path)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert (engine(file), states()) == ([], {})


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
@pytest.mark.parametrize("broken", [["psutil"], ["pydantic"], ["psutil", "pydantic"], ["omni_fastpath.patches"]])
@isolated("warm")
def test_dependency_of_ours_that_is_broken(tmp_path: Path, broken: list[str]) -> None:
    """What cannot be imported: whoever asked for nothing is served, ``fail`` refuses at the reading and at the gate."""
    register()
    for name in broken:
        assert not name.startswith("omni_fastpath") or name not in sys.modules
        sys.modules[name] = None  # type: ignore[assignment]
    messages = log()
    plain = yaml(tmp_path)
    assert read(plain) == raw(*READER).__wrapped__(plain)
    assert read(yaml(tmp_path, **ALL_ON))["stages"]
    assert "the configuration cannot take effect" in messages[-1]
    refused = yaml(tmp_path, "fail.yaml", fastpath={**ALL_ON["fastpath"], "on_unsupported": "fail"})
    with pytest.raises(RuntimeError, match="on_unsupported is 'fail'"):
        read(refused)
    with pytest.raises(RuntimeError, match="on_unsupported is 'fail'"):
        engine(refused)
    assert engine(plain) == []


@pytest.mark.upstream
@pytest.mark.parametrize("broken", ["psutil", "pydantic", "omni_fastpath.patches"])
@pytest.mark.parametrize("word", ["fail", "warn"])
@isolated("warm")
def test_dependency_that_is_broken_before_a_server_without_a_yaml(broken: str, word: str) -> None:
    """No deploy YAML is read where an engine has none: ``fail`` refuses it at the gate, ``warn`` lets it start."""
    os.environ.update(OMNI_FASTPATH="1", OMNI_FASTPATH_ON_UNSUPPORTED=word)
    assert "omni_fastpath.patches" not in sys.modules
    sys.modules[broken] = None  # type: ignore[assignment]
    messages = log()
    register()
    assert "registration failed" in messages[-1]
    if word == "fail":
        with pytest.raises(RuntimeError, match="on_unsupported is 'fail'"):
            engine(None)
    else:
        assert engine(None) == []
    assert "the configuration cannot take effect" in messages[-1]


@pytest.mark.upstream
@isolated("warm")
def test_refusal_ends_where_our_error_lets_the_server_start(tmp_path: Path) -> None:
    """A file that was refused and mended, and that an error of ours keeps from being judged under ``warn``, starts."""
    register()
    with pytest.raises(ValueError, match="budgeted_drian"):
        read(yaml(tmp_path, fastpath={"budgeted_drian": True}))
    _break("resolve")
    assert engine(yaml(tmp_path, **ALL_ON)) == []


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
    messages = log()
    register()
    file = yaml(tmp_path, **block)
    assert read(file) == raw(*READER).__wrapped__(file)
    assert engine(file) == []
    assert asked() == (dict.fromkeys(ALL_ON["fastpath"], "applied") if block else {})
    assert not any(name in message for name in KUBERNETES for message in messages)
    assert is_ours(raw(*GATE)) is bool(block)


@pytest.mark.upstream
@pytest.mark.parametrize("without_yaml", [False, True])
@isolated("warm")
def test_unknown_variable_is_told_where_nothing_is_asked(tmp_path: Path, without_yaml: bool) -> None:
    """A misspelt variable beside nothing else does not stop a server: one warning, however often the YAML is read."""
    os.environ["OMNI_FASTPATH_BUDGETED_DRIAN"] = "1"
    messages = log()
    register()
    file = None if without_yaml else yaml(tmp_path)
    for _ in range(3):
        assert engine(file) == []
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
        engine(file)
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
    bootstrap.judge(str(file), taken)
    assert set(states().values()) == {"failed"}
    [shown] = state_files()
    assert "cannot be read" in shown["patches"]["budgeted_drain"]["reason"]


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
            engine(file)
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
    for running in (first, third, fourth):
        running.shut_down()
