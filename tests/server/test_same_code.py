"""The same code under another name: what is applied on a release that no row names, and stock's answers there.

On light engines. What a stage does is the same code of ours (test_install), and needs no server of its own here.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rigs import overlays
from omni_fastpath.declare import Process
from omni_fastpath.install import row_here, state_here
from omni_fastpath.patches import PATCHES
from omni_fastpath.releases import vllm_omni_release
from tests.questions import of_each_kind
from tests.server.conftest import states

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(900)]

EVERY_PATCH = {patch.env: "1" for patch in PATCHES}
ASKED = {"OMNI_FASTPATH_ON_UNLISTED": "same_code"}
OF_SERVER = [patch for patch in PATCHES if Process.SERVER in patch.processes]
CHANGED = ("engine/orchestrator.py", "    async def _process_llm_stage_outputs(", "_process_llm_stage_outputs")


def renamed(folder: Path, version: str, *, changed: bool) -> Path:
    """The installed vLLM-Omni under another version, one body of it changed or not: what is first on Python's path."""
    here = distribution("vllm-omni")
    package, metadata = Path(str(here.locate_file("vllm_omni"))), Path(str(here.locate_file("."))).glob("vllm_omni-*")
    about = folder / f"vllm_omni-{version}.dist-info"
    shutil.copytree(next(metadata), about)
    said = (about / "METADATA").read_text(encoding="utf-8")
    (about / "METADATA").write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", said), encoding="utf-8")
    edited = Path(CHANGED[0])
    for each in (Path(), edited.parent):
        (folder / "vllm_omni" / each).mkdir()
        for entry in (package / each).iterdir():
            if entry.name not in ("__pycache__", edited.parts[0] if each == Path() else edited.name):
                (folder / "vllm_omni" / each / entry.name).symlink_to(entry)
    source = (package / edited).read_text(encoding="utf-8")
    if changed:
        head, found, rest = source.partition(CHANGED[1])
        assert found
        first, quotes, body = rest.partition('"""')
        doc, end, body = body.partition('"""')
        source = f"{head}{found}{first}{quotes}{doc}{end}\n        vendor = 'changed'{body}"
    (folder / "vllm_omni" / edited).write_text(source, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def answers(server: Callable[..., Any]) -> Callable[..., Any]:
    """What a server answers with such variables, the states of its patches, and its metrics."""
    from benchmarks.rigs.captures import run_closed_loop

    def ask(environment: Mapping[str, str], path: str | None) -> tuple[Any, dict[str, Any], str]:
        light = {"PYTHONPATH": path or "", "OMNI_SIMULATED_DEVICE": "light"}
        with server("qwen3_omni", "qwen3_omni.yaml", environment={**environment, **light}) as running:
            captures = run_closed_loop(running.url, of_each_kind(), 3)
            time.sleep(3)  # state files are refreshed every two seconds
            with urllib.request.urlopen(f"{running.url}/metrics") as scraped:  # noqa: S310 - our own
                metrics = scraped.read().decode()
            return captures, states(running), metrics

    return ask


@pytest.fixture(scope="module")
def stock(answers: Callable[..., Any]) -> Any:
    """What stock answers on the installed release, which is listed."""
    row = row_here(PATCHES[0])
    if row is None or os.environ.get("PYTHONPATH"):
        pytest.skip("of the installed release")
    return answers({"OMNI_FASTPATH": "0"}, None)[0]


@pytest.mark.parametrize(
    ("version", "asked", "applies", "changed"),
    [
        ("{}.post1", {}, True, False),
        ("{}+cu130", {}, True, True),
        ("0.30.1", ASKED, True, False),
        ("0.30.1", {}, False, False),
    ],
)
def test_a_renamed_release(
    answers: Callable[..., Any],
    stock: Any,
    tmp_path: Path,
    version: str,
    asked: Mapping[str, str],
    applies: bool,
    changed: bool,
) -> None:
    """What has every function of the release it is made of is applied, as that; a patch with another one is not."""
    from benchmarks.rigs.captures import differences

    release = vllm_omni_release()
    assert release is not None
    path = renamed(tmp_path, version.format(release.version), changed=changed)
    captures, of_server, metrics = answers({**EVERY_PATCH, **asked}, str(path))
    assert all(each.succeeded for each in captures)
    assert differences(captures, stock) == []
    for patch in OF_SERVER:
        row, found = row_here(patch), of_server[patch.name]
        touched = row is not None and any(CHANGED[2] in seam.path for seam in row.seams)
        serves = applies and not (changed and touched)
        assert (found["state"] == state_here(patch).value) is serves, found
        assert found["same_as"] == (release.version if serves else ""), found
        assert (f"is as in {release.version}" in found["remarks"]) is serves, found
        if serves:
            assert f'patch="{patch.name}",process="server",replica="",same_as="{release.version}"' in metrics


def test_a_release_that_nobody_has_read(answers: Callable[..., Any]) -> None:
    """On 0.31.0rc1 some patches find the functions of a tested release; they serve, and answers are stock's."""
    from benchmarks.rigs.captures import differences

    release = "0.31.0rc1"
    try:
        overlays.fetch(release)
    except RuntimeError as error:
        pytest.skip(str(error))
    path = overlays.python_path(release)
    expected, *_ = answers({"OMNI_FASTPATH": "0"}, path)
    captures, of_server, _ = answers({**EVERY_PATCH, **ASKED}, path)
    assert all(each.succeeded for each in captures)
    assert differences(captures, expected) == []
    same = {name: each["same_as"] for name, each in of_server.items() if each["state"] == "applied"}
    assert same.keys() >= {"nonblocking_dequeue", "final_output_wakeup"}
    assert set(same.values()) == {"0.30.0"}
    assert of_server["budgeted_drain"]["state"] == "unsupported"
