"""Completions whose token ids so far are copied when somebody looks at them, and not before.

Upstream copies all ids of a request into each of its completions. Most are never read: the input processors of the next
stage read the terminal one's. An alias would not do, because the list grows behind a completion that is still on its
way. The detokenizer's list only grows, so that the list and two places in it say what the copy would be, at any time
and on any thread.
"""

from __future__ import annotations

import copyreg
from dataclasses import fields
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer, SlowIncrementalDetokenizer

from omni_fastpath.ledger import runtime

from .upstream import MultimodalCompletionOutput

_counters = runtime("lean_processing").counters

_IDS = "cumulative_token_ids"
_SOURCE = "_omni_fastpath_token_ids"

READ = frozenset({IncrementalDetokenizer, FastIncrementalDetokenizer, SlowIncrementalDetokenizer})
"""The detokenizers whose lists are known to grow at their end and to change in no other way."""


class StandIn:
    """Stands in a detokenizer's place while upstream makes a completion that is not the last: it has no ids to copy.

    Args:
        detokenizer: One of ``READ``.

    Attributes:
        begin: Where the output's ids begin in the detokenizer's list; before them may stand the prompt's.
    """

    __slots__ = ("begin", "get_next_output_text")
    output_token_ids: tuple[int, ...] = ()

    def __init__(self, detokenizer: Any) -> None:
        self.get_next_output_text = detokenizer.get_next_output_text
        self.begin = len(detokenizer.token_ids) - detokenizer.num_output_tokens()


class _TokenIdsSoFar:
    """The attribute ``cumulative_token_ids``: the first look makes the list and leaves it in the completion.

    No data descriptor, so that what stands in the completion itself is found first.
    """

    def __get__(self, completion: Any, _owner: type[Any] | None = None) -> list[int]:
        known = vars(completion) if completion is not None else {}
        if _SOURCE not in known:
            raise AttributeError(_IDS)
        ids, begin, end = known[_SOURCE]
        found: list[int] = ids[begin:end]
        known[_IDS] = found
        _counters["copied"] += 1
        return found


class _Deferred:
    """What upstream's two classes of completions have in common here."""

    cumulative_token_ids = _TokenIdsSoFar()
    _upstreams: type[Any]

    def __reduce__(self) -> Any:
        """A copy and what goes into another process is upstream's own, with its ids in it."""
        if _SOURCE in vars(self):
            self.cumulative_token_ids  # noqa: B018  (the look leaves them)
        state = dict(vars(self))
        state.pop(_SOURCE, None)
        return copyreg._reconstructor, (self._upstreams, object, None), state  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        """What upstream's dataclass answers, which asks for the same class."""
        if getattr(type(other), "_upstreams", type(other)) is not self._upstreams:
            return NotImplemented
        names = [field.name for field in fields(CompletionOutput)]
        return tuple(getattr(self, name) for name in names) == tuple(getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]


class _Completion(_Deferred, CompletionOutput):  # type: ignore[misc]
    _upstreams = CompletionOutput


class _MultimodalCompletion(_Deferred, MultimodalCompletionOutput):  # type: ignore[misc]
    _upstreams = MultimodalCompletionOutput


_OURS: dict[type[Any], type[Any]] = {each._upstreams: each for each in (_Completion, _MultimodalCompletion)}


def defer(completion: Any, detokenizer: Any, stand_in: StandIn) -> None:
    """Give a completion that was made with a ``StandIn`` the ids that its request has by now.

    Args:
        completion: Upstream's; of its two classes, or of whatever class, which then gets a copy at once.
        detokenizer: Whose ids.
        stand_in: What stood in its place.
    """
    ours = _OURS.get(type(completion))
    if ours is None:
        completion.cumulative_token_ids = list(detokenizer.output_token_ids)
        return
    known, ids = vars(completion), detokenizer.token_ids
    known.pop(_IDS, None)
    known[_SOURCE] = ids, stand_in.begin, len(ids)
    completion.__class__ = ours
