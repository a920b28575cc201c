"""What kind of process this is, by its name and its command line."""

from __future__ import annotations

import multiprocessing

import pytest

from omni_fastpath.process_role import is_serve, port, spawned_as, value

SERVE = ["serve", "model", "--omni"]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("StageEngineCoreProc_stage0_replica1", "stage"),
        ("EngineCore", "stage"),
        ("EngineCore_DP1", "stage"),
        ("StageDiffusionProc", "worker"),
        ("VllmWorker-0", "worker"),
        ("ApiServer_0", None),
        ("Process-1", None),
    ],
)
def test_a_spawned_process_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str, role: str | None) -> None:
    """The name that upstream gives says the role; a process that was not spawned has none."""
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    assert spawned_as() is None
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert spawned_as() == role


@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        (SERVE, True),
        (SERVE[:2], False),
        (["bench", "serve", "--omni"], False),
        (["--omni", "serve"], False),
        ([], False),
    ],
)
def test_serving_is_told_from_other_commands(arguments: list[str], served: bool) -> None:
    """The subcommand comes first, and ``--omni`` makes it ours."""
    assert is_serve(arguments) is served


@pytest.mark.parametrize(
    ("arguments", "found"),
    [([], None), (["--port"], None), (["--port", "1", "--port=2"], "2"), (["--port", "--host", "h"], None)],
)
def test_the_value_of_an_option(arguments: list[str], found: str | None) -> None:
    """The last one counts; a command line without it has none; a port is a number."""
    assert value(arguments, "--port") == found
    assert port(arguments) == (None if found is None else int(found))


def test_an_option_is_read_as_vllm_reads_it() -> None:
    """``_`` in its name is ``-``; in its value it stays."""
    words = ["vllm", "serve", "m", "--deploy_config", "a_b.yaml", "--served_model-name=m_1"]
    assert (value(words, "--deploy-config"), value(words, "--served-model-name")) == ("a_b.yaml", "m_1")
