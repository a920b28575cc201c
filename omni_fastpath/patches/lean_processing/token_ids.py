"""Completions that copy a request's token ids when ``cumulative_token_ids`` is read, and not when they are made.

Upstream copies all ids of a request into each of its completions, and most copies are never read. The list of a
detokenizer in ``READ`` only grows at its end, so that the list and two positions in it determine the copy at any later
time and on any thread. An alias of the list would not do, because the list grows before the completion is read.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer
from vllm_omni.outputs.output_processor import OmniRequestState

from omni_fastpath.ledger import state_of

_patch = state_of("lean_processing")

_SOURCE = "_omni_fastpath_token_ids"
_OFFSET = "_last_output_text_offset"
"""The position up to which a detokenizer has returned its text. One without a tokenizer has none."""

READ = frozenset({IncrementalDetokenizer, FastIncrementalDetokenizer, SlowIncrementalDetokenizer})
"""The detokenizers whose code was read. With any other one, completions have upstream's copies."""


class TextCompletion(CompletionOutput):  # type: ignore[misc]
    """A completion in the middle of a request that has no payload."""

    @cached_property
    def cumulative_token_ids(self) -> list[int]:
        """The ids of the request up to this completion, copied by the first read."""
        ids, begin, end = vars(self)[_SOURCE]
        found: list[int] = ids[begin:end]
        return found


class LeanState(OmniRequestState):  # type: ignore[misc]
    """Upstream's state of a request, whose class is changed to this one at its first entry.

    Attributes:
        unseen: The request's ``Unseen``. False if something receives its outputs, None if that is not known yet.
    """

    detokenizer: Any
    unseen: Any = None

    def make_request_output(self, new_token_ids: Any, *others: Any, **more: Any) -> Any:
        """Make an output as upstream does. In the middle of a request of plain tokens it is made here."""
        try:
            if all(each is None for each in (*others, *more.values())) and self._is_plain():
                processor, detokenizer = self.logprobs_processor, self.detokenizer
                offset = getattr(detokenizer, _OFFSET, None)
                text = detokenizer.get_next_output_text(False, True)
                completion = TextCompletion(
                    self.request_index, text, new_token_ids, processor.cumulative_logprob, processor.logprobs
                )
                _defer(completion, detokenizer)
                return self._new_request_output(self.external_req_id, [completion], False)
        except Exception as error:
            _patch.fail("making an output", error)
            if (offset := locals().get("offset")) is not None:  # bound, so read: the detokenizer returns it again
                setattr(self.detokenizer, _OFFSET, offset)
        return super().make_request_output(new_token_ids, *others, **more)

    def _is_plain(self) -> bool:
        """Whether a completion with DELTA has only a text and token ids."""
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
            and not _patch.has_failed
        )


def _defer(completion: Any, detokenizer: Any) -> None:
    """Give a completion the token ids that its request has now, without a copy."""
    ids = detokenizer.token_ids
    end = len(ids)
    completion.__dict__[_SOURCE] = ids, end - detokenizer.num_output_tokens(), end  # the prompt's ids may be in front
