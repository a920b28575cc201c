"""A request's state in an output processor of ours: upstream's, but for what nobody looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm_omni.metrics.definitions import _SAMPLE_RATE_KEYS

from omni_fastpath.ledger import runtime

from .aside import patch, step_aside
from .completions import READ, StandIn, defer
from .upstream import (
    DRAINABLE_MODALITIES,
    TAKES_OUT_AT_EACH_OUTPUT,
    MultimodalCompletionOutput,
    OmniRequestState,
    drain_delta_payload,
    is_session,
)

_counters = runtime("lean_processing").counters

_COUNTED = frozenset({"audio", "model_outputs", *_SAMPLE_RATE_KEYS})
"""Keys of a payload that upstream's stage statistics read at each output."""

_DRAINED = frozenset({"meta", *map(str, DRAINABLE_MODALITIES)})
"""First parts of the keys that upstream may drain after an output."""

_DELTA, _CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


class LeanState(OmniRequestState):  # type: ignore[misc]
    """Upstream's state of a request, whose class is changed to this one when the request is added.

    Attributes:
        stand_in: What stands in the detokenizer's place while a completion that is not the last is made.
        unseen: Nobody sees what this request makes here (then it is an ``UnseenState``); None while undecided.
    """

    detokenizer: Any
    stand_in: StandIn | None = None
    unseen: Unseen | Literal[False] | None = None

    def _new_completion_output(
        self, token_ids: list[int], finish_reason: Any, stop_reason: Any, routed_experts: Any = None
    ) -> Any:
        if routed_experts is not None:  # of a stage without a detokenizer; 0.22 has none
            return super()._new_completion_output(token_ids, finish_reason, stop_reason, routed_experts)
        detokenizer = self.detokenizer
        stand_in = self._stand_in_for(detokenizer) if finish_reason is None else None
        if stand_in is None:
            return super()._new_completion_output(token_ids, finish_reason, stop_reason)
        self.detokenizer = stand_in
        try:
            completion = super()._new_completion_output(token_ids, finish_reason, stop_reason)
        finally:
            self.detokenizer = detokenizer
        if self.output_kind is not _DELTA:
            completion.token_ids = detokenizer.output_token_ids
        try:
            defer(completion, detokenizer, stand_in)
        except Exception as error:
            step_aside("putting off a copy of token ids", error)
            completion.cumulative_token_ids = list(detokenizer.output_token_ids)
        return completion

    def _stand_in_for(self, detokenizer: Any) -> StandIn | None:
        try:
            if patch.has_failed or type(detokenizer) not in READ:
                return None
            if self.stand_in is None:
                self.stand_in = StandIn(detokenizer)
        except Exception as error:
            step_aside("standing in for a detokenizer", error)
            return None
        return self.stand_in


class UnseenState(LeanState):
    """The state of a request of which nobody sees what it makes here."""

    unseen: Unseen

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        """What upstream makes; in the middle of the request a bare object that says whose it is.

        What comes after the transfer parameters differs between releases, and comes with an end alone.
        """
        if (
            finish_reason is None
            and pooling_output is None
            and kv_transfer_params is None
            and self.unseen.went_by(self)
        ):
            return self.unseen.bare
        return super().make_request_output(
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            kv_transfer_params,
            *more,
            **named,
        )

    def _new_completion_output(
        self, token_ids: list[int], finish_reason: Any, stop_reason: Any, routed_experts: Any = None
    ) -> Any:
        self.unseen.look_at(self.mm_accumulated)
        completion = super()._new_completion_output(token_ids, finish_reason, stop_reason, routed_experts)
        if not isinstance(completion, MultimodalCompletionOutput):
            self.unseen.forget()
        return completion


class BareOutput(RequestOutput):  # type: ignore[misc]
    """What goes through upstream's routing in the place of an output: whose it is, and that it is not the end."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None, None, None, [], finished=False)


class Unseen:
    """What is left to do for an output in the middle of a request that nobody sees.

    Args:
        request: The orchestrator's state of the request, which says whether it became a session.
        name: The request's id, as the orchestrator has it.
        firsts: The pool's time of each request's first output with something in it, which upstream must see made.

    Attributes:
        bare: What goes through routing in the place of each output.
    """

    __slots__ = ("_drains", "_firsts", "_keys", "_metadata", "_name", "_request", "_tensors", "bare")

    def __init__(self, request: Any, name: str, firsts: Mapping[str, float]) -> None:
        self.bare = BareOutput(name)
        self._request, self._name, self._firsts = request, name, firsts
        self.forget()

    def forget(self) -> None:
        """No keys are known; where upstream makes no multimodal output of the payload (it logs why), none will be."""
        self._tensors: frozenset[str] | None = None
        self._metadata: frozenset[str] | None = None
        self._keys: frozenset[str] = frozenset()
        self._drains = True

    def knows(self, payload: Any) -> bool:
        """Whether a raw entry's payload can be accumulated ahead of its turn: of known keys, none of them drained."""
        return type(payload) is dict and not self._drains and payload.keys() <= self._keys and "hidden" not in payload

    def went_by(self, state: LeanState) -> bool:
        """Do what making the output would have done besides, if no more is needed.

        Text offset, prompt logprobs, consolidation and draining advance through upstream's own functions.

        Returns:
            Whether that is all; else upstream makes the output.
        """
        try:
            return not patch.has_failed and self._goes_by(state)
        except Exception as error:
            step_aside("letting an output that nobody sees go by", error)
            return False

    def _goes_by(self, state: LeanState) -> bool:
        request = self._request
        if request.streaming.enabled or is_session(request):
            return False
        if self._name not in self._firsts:  # its binding was released: all that is recorded of it begins anew
            self.forget()
            return False
        payload = state.mm_accumulated
        tensors, metadata = payload.tensors, payload.metadata
        holds = bool(tensors or metadata)
        if holds and (tensors.keys() != self._tensors or metadata.keys() != self._metadata):
            return False
        if TAKES_OUT_AT_EACH_OUTPUT and state.sampling_mask_chunks:  # with DELTA each output takes them out
            return False
        if state.output_kind is _DELTA:
            state.detokenizer.get_next_output_text(False, True)
            if state.logprobs_processor is not None:
                state.logprobs_processor.pop_prompt_logprobs()
                if TAKES_OUT_AT_EACH_OUTPUT:
                    state.logprobs_processor.pop_prompt_token_id_logprobs()
            if holds and self._drains:
                drain_delta_payload(payload)
        elif holds:
            state._consolidate_multimodal_tensors()
        _counters["not_built"] += 1
        return True

    def look_at(self, payload: Any) -> None:
        """Upstream makes an output of this payload: those with the same keys need none, if nothing counts their values.

        What counts: audio frames and a sample rate, for statistics. A dotted key whose first part is a key of its own
        changes the accumulated payload when it is unflattened, and is left to upstream.
        """
        try:
            self._look_at(payload)
        except Exception as error:
            step_aside("looking at a payload's keys", error)
            self.forget()

    def _look_at(self, payload: Any) -> None:
        tensors, metadata = frozenset(payload.tensors), frozenset(payload.metadata)
        keys = tensors | metadata
        roots = {key.partition(".")[0] for key in keys}
        dotted = {key.partition(".")[0] for key in keys if "." in key}
        if roots & _COUNTED or dotted & keys:
            self.forget()
        else:
            self._tensors, self._metadata, self._keys = tensors, metadata, keys
            self._drains = not roots.isdisjoint(_DRAINED)


def unseen_kind(state: Any) -> bool:
    """Whether a request's state is one whose outputs can go by: no pooling, no siblings, nobody who collects them."""
    return (
        type(state) is LeanState
        and state.output_kind in (_DELTA, _CUMULATIVE)
        and state.stream_interval == 1
        and state.parent_req is None
        and state.queue is None
        and not state.streaming_input
        and type(state.detokenizer) in READ
    )
