"""The door, on the real upstream: what registration does and costs; each case in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.processes import ROOT, isolated
from tests.fakes.registration import (
    READER,
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

# ---- What it costs to be there ----


@pytest.mark.parametrize("module", ["omni_fastpath.bootstrap", "omni_fastpath.patches", "omni_fastpath.tools.cli"])
def test_import_is_cheap(module: str) -> None:
    """Neither machinery nor declarations import torch, vllm, vLLM-Omni, wrapt or pluggy."""
    script = f"import sys, {module}; print(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "vllm", "vllm_omni", "wrapt", "pluggy", "janus", "numpy"} & set(run.stdout.split())


@pytest.mark.parametrize(
    ("variables", "packages", "rooms"),
    [
        ({}, {"omni_fastpath", "wrapt"}, {"bootstrap", "gates", "variables", "ownerror", "releases", "spawned"}),
        ({"OMNI_FASTPATH": "0"}, {"omni_fastpath"}, {"bootstrap", "variables", "ownerror", "releases", "spawned"}),
    ],
    ids=["nobody asks", "off"],
)
def test_registration_imports_the_standard_library_and_wrapt(
    variables: dict[str, str], packages: set[str], rooms: set[str]
) -> None:
    """Where nobody asks for anything no other package comes with us, and of ours what stands at the door."""
    script = (
        "import sys; before = {*sys.modules}; from omni_fastpath.bootstrap import register; register();"
        "print(*sorted({*sys.modules} - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    imported = set(run.stdout.split()) - {"__mp_main__"}  # what multiprocessing calls the main module
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == packages
    assert {name.removeprefix("omni_fastpath.") for name in imported if name.startswith("omni_fastpath.")} == rooms


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


# ---- An upstream that has moved ----


@pytest.mark.upstream
@isolated("cold")
def test_reader_that_is_gone_is_told() -> None:
    """An upstream without the reader: where nobody asked one line at most, and no state; variables work on."""
    from types import ModuleType

    messages = log()
    register()
    from omni_fastpath.bootstrap import judge
    from omni_fastpath.gates import Reader

    module = ModuleType(READER[0])
    Reader(judge).wrap(module)
    logging.getLogger("vllm.omni_fastpath").setLevel(logging.INFO)
    assert (states(), state_files()) == ({}, [])
    messages.clear()
    Reader(judge).wrap(module)
    assert messages == []
    sys.argv[1:] = ["serve", "model", "--omni"]
    Reader(judge).wrap(module)
    [message] = messages
    assert "is gone" in message
