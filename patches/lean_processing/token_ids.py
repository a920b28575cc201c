"""Completions that copy a request's token ids when ``cumulative_token_ids`` is read, and not when they are made.

Upstream copies all ids of a request into each of its completions, and most copies are never read. The list of a
detokenizer in ``READ`` only grows at its end, so the list and two positions in it say what the copy would be, at any
later time and on any thread. An alias of the list would not do: it grows while a completion is on its way.
"""

from __future__ import annotations

from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm_omni.outputs.mm_outputs import MultimodalCompletionOutput
from vllm_omni.outputs.output_processor import OmniRequestState

from .step_aside import patch, step_aside

_IDS = "cumulative_token_ids"
_SOURCE = "_omni_fastpath_token_ids"

READ = frozenset({IncrementalDetokenizer, FastIncrementalDetokenizer, SlowIncrementalDetokenizer})
"""The detokenizers whose code was read; any other gets upstream's copies."""


class _TokenIdsSoFar:
    """The attribute ``cumulative_token_ids``: the first read makes the list and leaves it in the completion.

    It has no ``__set__``, so that a list that stands in the completion is found before it.
    """

    def __get__(self, completion: Any, _owner: type[Any] | None = None) -> list[int]:
        known = vars(completion) if completion is not None else {}
        if _SOURCE not in known:
            raise AttributeError(_IDS)
        ids, begin, end = known[_SOURCE]
        found: list[int] = ids[begin:end]
        known[_IDS] = found
        patch.counters["copied"] += 1
        return found


class TextCompletion(CompletionOutput):  # type: ignore[misc]
    """A completion in the middle of a request that has no payload."""

    cumulative_token_ids = _TokenIdsSoFar()


class _MultimodalCompletion(MultimodalCompletionOutput):  # type: ignore[misc]
    cumulative_token_ids = _TokenIdsSoFar()


_OURS: dict[type[Any], type[Any]] = {
    CompletionOutput: TextCompletion,
    MultimodalCompletionOutput: _MultimodalCompletion,
}


class _StandIn:
    """Takes a detokenizer's place while upstream makes a completion: it gives the same text and has no ids to copy."""

    __slots__ = ("get_next_output_text",)
    output_token_ids: tuple[int, ...] = ()

    def __init__(self, detokenizer: Any) -> None:
        self.get_next_output_text = detokenizer.get_next_output_text


class LeanState(OmniRequestState):  # type: ignore[misc]
    """Upstream's state of a request with DELTA, whose class is changed to this one at its first entry."""

    detokenizer: Any
    _stand_in: _StandIn | None = None

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any, *more: Any) -> Any:
        """What upstream makes; one in the middle of the request copies its token ids when they are read."""
        detokenizer = self.detokenizer
        if finish_reason is not None or type(detokenizer) not in READ or patch.has_failed:
            return super()._new_completion_output(token_ids, finish_reason, stop_reason, *more)
        if self._stand_in is None:
            self._stand_in = _StandIn(detokenizer)
        self.detokenizer = self._stand_in
        try:
            completion = super()._new_completion_output(token_ids, finish_reason, stop_reason, *more)
        finally:
            self.detokenizer = detokenizer
        try:
            _defer(completion, detokenizer)
        except Exception as error:
            step_aside("putting off a copy of token ids", error)
            completion.cumulative_token_ids = list(detokenizer.output_token_ids)
        return completion


def make_lean(state: Any) -> None:
    """Let a request's state make its completions with ``LeanState``, if it is upstream's own and has DELTA."""
    if type(state) is OmniRequestState and state.output_kind is RequestOutputKind.DELTA:
        state.__class__ = LeanState


def _defer(completion: Any, detokenizer: Any) -> None:
    """Let a completion that was made with a stand-in have the ids that its request has now."""
    ours, known, ids = _OURS[type(completion)], vars(completion), detokenizer.token_ids
    known.pop(_IDS, None)
    known[_SOURCE] = ids, len(ids) - detokenizer.num_output_tokens(), len(ids)  # the prompt's ids may stand before
    completion.__class__ = ours
