"""What omni-fastpath does in a stage process, for stage engines that are not processes.

A light engine sends what a stage process of the same server would send. In the process that launches it, `in_stage`
asks the patch ``forward_gate`` itself about the stage, with the configuration that a stage process inherits. In the
process of the engines, `Published` writes the state file of a stage, so that ``omni-fastpath status`` and the proof of
an arm see light engines as they see stages.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import msgspec

SWITCH, HANDOFF = "OMNI_FASTPATH", "_OMNI_FASTPATH_HANDOFF"
GATE = "forward_gate"
APPLIED = "applied"

_GRAVEST = ("failed", "unsupported", APPLIED, "superseded", "not_applicable", "off")
"""Which state is shown of several engines'."""


class InStage(msgspec.Struct):
    """What a stage process would say of the patches.

    Attributes:
        source: Where the configuration is from.
        states: State and reason of each patch.
    """

    source: str | None
    states: dict[str, tuple[str, str]]

    @property
    def gated(self) -> bool:
        """Whether the stage keeps back what the next stage gets through the connector."""
        return self.states[GATE][0] == APPLIED


def in_stage(vllm_config: Any) -> InStage | None:
    """What omni-fastpath would be in the process of this stage; None where it would leave no state file there."""
    if HANDOFF not in os.environ and SWITCH not in os.environ:
        return None
    from omni_fastpath import process_role
    from omni_fastpath.config import Resolved
    from omni_fastpath.patches import PATCHES

    if process_role.master_off(os.environ):
        return InStage(None, {patch.name: ("off", f"{SWITCH}=0") for patch in PATCHES})
    handed = json.loads(os.environ.get(HANDOFF, '{"parent": 0}'))
    if handed["parent"] not in (os.getpid(), *process_role.ancestors(os.getpid())):
        return None
    resolved = Resolved.from_json(handed["resolved"], PATCHES)
    states = {}
    for patch in PATCHES:
        if patch.name not in resolved.enabled:
            states[patch.name] = ("off", resolved.off.get(patch.name, "not asked for"))
        elif patch.name == GATE:
            states[patch.name] = _gate(patch, vllm_config)
        else:
            states[patch.name] = ("not_applicable", "light engines have nothing that it could serve")
    return InStage(resolved.source, states)


def _gate(patch: Any, vllm_config: Any) -> tuple[str, str]:
    """What the patch says of the stage, as it does when the stage's scheduler is made."""
    from omni_fastpath import install
    from omni_fastpath.declare import Fit

    row = install.row_here(patch)
    if not isinstance(row, Fit):
        return install.state_here(patch).value, "" if row is None else row.note
    processor = getattr(vllm_config.model_config, "custom_process_next_stage_input_func", None)
    if processor:  # as upstream's adapter resolves it
        module, _, name = processor.rpartition(".")
        processor = getattr(importlib.import_module(module), name)
    adapter = SimpleNamespace(custom_process_next_stage_input_func=processor)
    scheduler = SimpleNamespace(vllm_config=vllm_config, chunk_transfer_adapter=adapter)
    state, reason = install.import_wrappers(patch).verdict(scheduler)
    return state.value, reason


class Published:
    """The state file of the engines' process; there is none before `add` was called."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._publisher: Any = None

    def add(self, said: InStage) -> None:
        """Show what an engine's stage says, where that is graver than what another engine's says."""
        from omni_fastpath.declare import Process, State
        from omni_fastpath.ledger import LEDGER
        from omni_fastpath.patches import PATCHES

        for patch in PATCHES:
            state, reason = said.states[patch.name]
            entry = LEDGER.entry(patch)
            if self._publisher is None or _GRAVEST.index(state) < _GRAVEST.index(entry.state.value):
                LEDGER.set(patch, State(state), reason)
            if patch.name == GATE:
                self._counters = entry.counters
        if self._publisher is None:
            multiprocessing.current_process().name = "LightEngines"
            module = "state" if importlib.util.find_spec("omni_fastpath.state") else "statefile"  # of an older checkout
            publisher = importlib.import_module(f"omni_fastpath.{module}").Publisher
            self._publisher = publisher(Process.STAGE, said.source or "environment")
            self._publisher.start()

    def kept_back(self) -> None:
        """An output left without its payload."""
        self._counters["multimodal_outputs"] += 1
