"""An installed vLLM-Omni in which somebody altered a file on disk: one patch does not fit, the others are on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_fastpath.declare import Process
from omni_fastpath.patches import PATCHES
from tests.fakes.installation import IN_A_STAGE, MODULE, STATEMENT, Alteration, Altered
from tests.fakes.processes import isolated
from tests.fakes.registration import read, register, yaml
from tests.test_activation import _stage

pytestmark = pytest.mark.upstream

EVERY_PATCH: dict[str, Any] = {"fastpath": {patch.name: True for patch in PATCHES}}


def use(folder: Path, *alterations: Alteration) -> None:
    """Have this process, and those that it spawns, import an altered vLLM-Omni."""
    assert "vllm_omni" not in sys.modules
    installation = Altered(folder / "altered")
    for each in alterations:
        each.make(installation)
    sys.path.insert(0, str(installation.folder))


@pytest.mark.parametrize("alteration", [STATEMENT, MODULE], ids=["statement", "module"])
@isolated("cold")
def test_that_patch_is_unsupported_and_the_others_are_on(tmp_path: Path, alteration: Alteration) -> None:
    """A server's process, every patch asked for: the reason names the seam, and so does ``status --verify``."""
    from omni_fastpath.install import state_here
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.tools.status import status_report

    use(tmp_path, alteration)
    register()
    read(yaml(tmp_path, **EVERY_PATCH))
    assert str(sys.modules["vllm_omni"].__file__).startswith(str(tmp_path))
    verified = status_report(os.environ, PATCHES, verify=True)
    for patch in PATCHES:
        entry, problems = LEDGER.entry(patch), verified["verify"][patch.name]
        if patch.name == alteration.patch:
            assert entry.state.value == "unsupported"
            assert entry.reason.startswith(f"a seam moved: {alteration.told}"), entry.reason
            assert problems[0].startswith(alteration.told)
            told = f"{patch.name}: {alteration.told}"
            assert any(each["id"] == "seam-moved" and each["what"].startswith(told) for each in verified["findings"])
        else:
            here = state_here(patch).value if Process.SERVER in patch.processes else "not_applicable"
            assert (entry.state.value, problems) == (here, []), entry.reason


@isolated("cold")
def test_a_stage_is_altered(tmp_path: Path) -> None:
    """What is altered in a stage's code is unsupported in that process, and the server and its other patches are on."""
    from omni_fastpath.ledger import LEDGER

    use(tmp_path, IN_A_STAGE)
    register()
    read(yaml(tmp_path, **EVERY_PATCH))
    assert LEDGER.named("forward_gate").state.value == "not_applicable"
    assert LEDGER.named("budgeted_drain").state.value == "applied"
    seen, [shown], _ = _stage()
    assert (seen["forward_gate"], seen["save_queue_cap"]) == ("unsupported", "applied")
    assert shown["patches"]["forward_gate"]["reason"].startswith(f"a seam moved: {IN_A_STAGE.told}")
