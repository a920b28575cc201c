"""State files as typed objects, for what measures and proves arms."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from omni_fastpath.declare import Process, State


class PatchRecord(BaseModel):
    """One patch in a state file."""

    model_config = ConfigDict(extra="allow")

    state: State
    reason: str = ""
    counters: dict[str, int] = {}
    figures: dict[str, list[dict[str, Any]]] = {}


class Snapshot(BaseModel):
    """A state file (``omni_fastpath.state.Publisher.said``)."""

    model_config = ConfigDict(extra="allow")

    pid: int
    started: int
    role: Process
    process_name: str
    stage: int | None = None
    replica: int | None = None
    omni_fastpath: str
    vllm: str | None
    vllm_omni: str | None
    source: str | None = None
    patches: dict[str, PatchRecord]
