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

from omni_fastpath.ledger import runtime

_runtime = runtime("lean_processing")

_IDS = "cumulative_token_ids"
_SOURCE = "_omni_fastpath_token_ids"
_OFFSET = "_last_output_text_offset"
"""Up to where a detokenizer has given its text; one without a tokenizer gives none."""

READ = frozenset({IncrementalDetokenizer, FastIncrementalDetokenizer, SlowIncrementalDetokenizer})
"""The detokenizers whose code was read; any other gets upstream's copies."""


class _TokenIdsSoFar:
    """The attribute ``cumulative_token_ids``: the first read makes the list and leaves it in the completion.

    It has no ``__set__``, so that a list that stands in the completion is found before it.
    """

    def __get__(self, completion: Any, _owner: type[Any] | None = None) -> list[int]:
        try:
            known = {} if completion is None else vars(completion)
            if _SOURCE in known:
                _runtime.counters["copied"] += 1
                ids, begin, end = known[_SOURCE]
                found: list[int] = known.setdefault(_IDS, ids[begin:end])
                return found
        except Exception as error:
            _runtime.fail("copying token ids", error)
            ids, begin, end = vars(completion)[_SOURCE]
            return list(ids[begin:end])
        raise AttributeError(_IDS)


class TextCompletion(CompletionOutput):  # type: ignore[misc]
    """A completion in the middle of a request that has no payload."""

    cumulative_token_ids = _TokenIdsSoFar()


class DeferredMultimodalCompletion(MultimodalCompletionOutput):  # type: ignore[misc]
    """A completion in the middle of a request that has a payload."""

    cumulative_token_ids = _TokenIdsSoFar()


_OURS: dict[type[Any], type[Any]] = {
    CompletionOutput: TextCompletion,
    TextCompletion: TextCompletion,
    MultimodalCompletionOutput: DeferredMultimodalCompletion,
}


class _StandIn:
    """Takes a detokenizer's place while upstream makes a completion: it gives the same text and has no ids to copy."""

    __slots__ = ("get_next_output_text",)
    output_token_ids: tuple[int, ...] = ()

    def __init__(self, detokenizer: Any) -> None:
        self.get_next_output_text = detokenizer.get_next_output_text


class LeanState(OmniRequestState):  # type: ignore[misc]
    """Upstream's state of a request, whose class is changed to this one at its first entry.

    Attributes:
        unseen: What ``unseen.py`` knows of the request; None before it was looked at.
    """

    detokenizer: Any
    unseen: Any = None
    _stand_in: _StandIn | None = None

    def make_request_output(
        self,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: Any = None,
        ec_transfer_params: Any = None,
        **more: Any,
    ) -> Any:
        """What upstream makes; in the middle of a request of plain tokens, without asking for anything else."""
        try:
            is_plain = (
                finish_reason is pooling_output is kv_transfer_params is ec_transfer_params is None
                and not more
                and self._is_plain()
            )
            if is_plain:
                processor, detokenizer = self.logprobs_processor, self.detokenizer
                offset = getattr(detokenizer, _OFFSET, None)
                text = detokenizer.get_next_output_text(False, True)
                completion = TextCompletion(
                    self.request_index, text, new_token_ids, processor.cumulative_logprob, processor.logprobs
                )
                _defer(completion, detokenizer)
                return self._new_request_output(self.external_req_id, [completion], False)
        except Exception as error:
            _runtime.fail("making an output", error)
            _give_text_again(self.detokenizer, locals().get("offset"))
        given = (new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, ec_transfer_params)
        return super().make_request_output(*given, **more)

    def _is_plain(self) -> bool:
        """Whether a completion with DELTA has a text and token ids, and nothing else is to be attached or taken out."""
        held = self.mm_accumulated
        return (
            self.output_kind is RequestOutputKind.DELTA
            and not held.tensors
            and not held.metadata
            and self.parent_req is None
            and self.stream_interval == 1
            and not self.sampling_mask_chunks
            and type(self.detokenizer) in READ
            and not self.logprobs_processor.logprobs
            and not _runtime.has_failed
        )

    def _new_completion_output(self, token_ids: Any, finish_reason: Any, stop_reason: Any, *more: Any) -> Any:
        """What upstream makes; one in the middle of the request copies its token ids when they are read."""
        try:
            detokenizer = self.detokenizer
            is_lean = (
                finish_reason is None
                and self.output_kind is RequestOutputKind.DELTA
                and type(detokenizer) in READ
                and detokenizer.token_ids  # else a copy costs nothing
                and not _runtime.has_failed
            )
            if is_lean:
                if self._stand_in is None:
                    self._stand_in = _StandIn(detokenizer)
                offset = getattr(detokenizer, _OFFSET, None)
                self.detokenizer = self._stand_in
                completion = super()._new_completion_output(token_ids, finish_reason, stop_reason, *more)
                self.detokenizer = detokenizer
                _defer(completion, detokenizer)
                return completion
        except Exception as error:
            _runtime.fail("making a completion", error)
            so_far = locals()
            self.detokenizer = so_far.get("detokenizer", self.detokenizer)
            completion = so_far.get("completion")
            if completion is not None:
                completion.cumulative_token_ids = list(self.detokenizer.output_token_ids)
                return completion
            _give_text_again(self.detokenizer, so_far.get("offset"))
        return super()._new_completion_output(token_ids, finish_reason, stop_reason, *more)


def _give_text_again(detokenizer: Any, offset: int | None) -> None:
    """Let a detokenizer give the text that it has given since it stood there."""
    if offset is not None:
        setattr(detokenizer, _OFFSET, offset)


def _defer(completion: Any, detokenizer: Any) -> None:
    """Let a completion that was made without ids have those that its request has now."""
    ours, known, ids = _OURS[type(completion)], completion.__dict__, detokenizer.token_ids
    known.pop(_IDS, None)
    end = len(ids)
    known[_SOURCE] = ids, end - detokenizer.num_output_tokens(), end  # the prompt's ids may stand before
    completion.__class__ = ours
