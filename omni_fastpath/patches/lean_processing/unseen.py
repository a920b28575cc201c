"""Outputs in the middle of a request at a stage whose outputs neither a user nor a later stage receives.

Upstream makes each of them and drops it in ``_route_output``. They are recognized here. In place of the output of an
entry with nothing but tokens, a bare object has the request's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.engine.orchestrator import Orchestrator, OrchestratorRequestState
from vllm_omni.outputs.output_processor import OmniRequestState

from .token_ids import LeanState

_SESSION_OWNED = "session_owned" if hasattr(OrchestratorRequestState, "session_owned") else "duplex_identity"
"""Attribute of the orchestrator's state of a request that a session owns. The second name is that of 0.28."""

_COUNTED = frozenset({"request_id", "new_token_ids", "num_generation_tokens", "is_coalesced"})
"""Fields of an entry for its request, its tokens and upstream's statistics."""

_MORE = [field for field in msgspec.structs.fields(OmniEngineCoreOutput) if field.name not in _COUNTED]
_brought = attrgetter(*(field.name for field in _MORE))
_NOTHING = tuple(field.default for field in _MORE)


class BareOutput(RequestOutput):  # type: ignore[misc]
    """Passes through upstream's routing in place of an output, with a request's id and not as its end."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None, None, None, [], finished=False)


@dataclass(frozen=True, slots=True)
class Unseen:
    """A request at a stage where nothing receives its outputs before the last one.

    Attributes:
        request: The orchestrator's state of the request, which may become a session's.
        name: The request's id.
        firsts: The pool's times of each request's first output with content, which are removed with its binding. If
            the pool keeps no times, the request alone.
        bare: The result for each entry, with an output that only passes through routing and no request to abort.
    """

    request: Any
    name: str
    firsts: Mapping[str, float]
    bare: OutputProcessorOutput

    def covers(self, state: Any, entry: Any) -> bool:
        """Whether upstream would only count this entry, keep its tokens and make an output."""
        held = state.mm_accumulated
        return (
            type(entry) is OmniEngineCoreOutput
            and _brought(entry) == _NOTHING
            and not held.tensors
            and not held.metadata
            and self.name in self.firsts
            and not self.request.streaming.enabled
            and not getattr(self.request, _SESSION_OWNED)
        )


def unseen_of(processor: Any, state: Any, entry: Any) -> Unseen | None:
    """The ``Unseen`` of an entry's request, if no output has to be made of the entry.

    Args:
        processor: The stage's processor.
        state: Its state of the request, which becomes a ``LeanState``. None for an unknown request.
        entry: The request's entry in a raw output.
    """
    if type(state) is not LeanState:
        if type(state) is not OmniRequestState:
            return None
        state.__class__ = LeanState
    unseen = state.unseen
    if unseen is None:
        unseen = state.unseen = _find_out(processor, state, entry.request_id)
    return unseen if unseen and unseen.covers(state, entry) else None


def attach(orchestrator: Any) -> None:
    """Record at each stage's processor for which orchestrator and stage it processes."""
    for stage_id, pool in enumerate(orchestrator.stage_pools):
        if pool.output_processor is not None:
            pool.output_processor.__dict__["stage"] = orchestrator, stage_id


def _find_out(processor: Any, state: Any, name: str) -> Unseen | Literal[False] | None:
    """The ``Unseen`` of a request at this stage. False if something receives its outputs, None if that is unknown.

    Upstream makes the outputs up to the first one with content, because its time may be sent to users.
    """
    stage = processor.__dict__.get("stage")
    if stage is None:
        return None
    orchestrator, stage_id = stage
    pool = orchestrator.stage_pools[stage_id]
    keeps_times = getattr(pool, "collect_stage_metrics", True)  # an option from 0.32 on
    firsts = pool._non_empty_first_output_timestamps_by_request if keeps_times else {name: 0.0}
    if name not in firsts:
        return None
    request = orchestrator.request_states.get(name)
    if request is None or not (_is_unseen(orchestrator, stage_id, pool) and _is_alone(orchestrator, state, name)):
        return False
    return Unseen(request, name, firsts, OutputProcessorOutput([BareOutput(name)], []))


def _is_unseen(orchestrator: Any, stage_id: int, pool: Any) -> bool:
    """Whether nothing receives a stage's outputs, because its next stage gets chunks through the connector."""
    return (
        type(orchestrator) is Orchestrator  # the plugins of a duplex orchestrator read every output
        and getattr(orchestrator, "duplex_control_plane", None) is None  # so do these, on 0.28
        and orchestrator.async_chunk
        and orchestrator._pd_pair is None
        and stage_id + 1 < orchestrator.num_stages
        and pool.stage_client is not None
        and not pool.final_output
        and orchestrator._stage_receives_async_chunks(stage_id + 1)
    )


def _is_alone(orchestrator: Any, state: Any, name: str) -> bool:
    """Whether a request has no companion, sibling or collector, and no text, so that only its tokens are kept."""
    companions = orchestrator._cfg_tracker
    return (
        state.external_req_id == name
        and state.output_kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
        and state.stream_interval == 1
        and state.parent_req is None
        and state.queue is None
        and not state.streaming_input
        and type(state.detokenizer) is IncrementalDetokenizer
        and not companions.is_companion(name)
        and not companions.has_companions(name)
    )
