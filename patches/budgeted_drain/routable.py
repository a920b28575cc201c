"""The default policy: which raw output has something for the user or the next stage, and so ends a pass.

Not "is there an output object": upstream makes one for nearly every step, and keys that are never drained (``sr``,
hidden states, codes) stand in every later snapshot. Not a field of any model either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_fastpath.hooks.specs import RawOutputView

Sizes = tuple[int, ...]


class DefaultPolicy:
    """Routable is what is terminal, an error, makes a forward happen, or brings the user something new.

    The last depends on how the request wants its outputs: DELTA, anything in this one; CUMULATIVE, more than the
    request's previous output had, by a small record that is dropped when the request ends; FINAL_ONLY, any object.

    Args:
        drainable: Modality keys that upstream empties after each DELTA output (``DRAINABLE_MODALITIES``). Other keys
            are state that is repeated, and say nothing about novelty.
        delta: Upstream's ``RequestOutputKind.DELTA``.
        cumulative: Upstream's ``RequestOutputKind.CUMULATIVE``.
    """

    def __init__(self, drainable: tuple[str, ...], delta: Any, cumulative: Any) -> None:
        self._drainable = drainable
        self._delta = delta
        self._cumulative = cumulative
        self._seen: dict[tuple[int, str], Sizes] = {}

    def __call__(self, view: RawOutputView) -> bool:
        """Whether this raw output is routable.

        It runs once per raw output of a stage that is seen, so the common case (DELTA, nothing new) is kept flat.
        """
        routable = False
        for entry in view.raw_outputs.outputs:
            if entry.finish_reason is not None or _forwards(entry):
                routable = True
                break
        for output in view.processed:
            # No early exit: the records of a CUMULATIVE request must see each of its outputs.
            if self._brings_something(view, output):
                routable = True
        return routable

    def _brings_something(self, view: RawOutputView, output: Any) -> bool:  # noqa: PLR0911 - flat, see __call__
        if output.finished or getattr(output, "error", None) is not None:
            self._seen.pop((view.stage_id, output.request_id), None)
            return True
        state = view.request_states.get(output.request_id)
        if state is None or not view.final_output:  # upstream drops the first and shows no user the second
            return False
        kind = getattr(state.sampling_params_list[view.stage_id], "output_kind", None)
        if kind is self._delta:
            for completion in output.outputs:
                if completion.text or completion.token_ids:
                    return True
                payload = getattr(completion, "multimodal_output", None)
                if payload is not None:
                    for key in self._drainable:
                        if _elements(payload.get(key)):
                            return True
            return False
        if kind is self._cumulative:
            return self._has_grown(view, output)
        return True

    def _has_grown(self, view: RawOutputView, output: Any) -> bool:
        key = view.stage_id, output.request_id
        sizes = tuple(size for completion in output.outputs for size in self._sizes(completion))
        before = self._seen.get(key, ())
        self._seen[key] = sizes
        if len(self._seen) > 2 * len(view.request_states) + 64:
            self._forget_ended(view.request_states)
        return sizes != before and any(sizes)  # smaller than before is a new segment's beginning

    def _sizes(self, completion: Any) -> Sizes:
        payload = getattr(completion, "multimodal_output", None) or {}
        values = tuple(_elements(payload.get(key)) for key in self._drainable)
        return (len(completion.text), len(completion.token_ids), *values)

    def _forget_ended(self, live: Mapping[str, Any]) -> None:
        """Drop the records of requests that ended without a finished output of theirs (aborts, errors)."""
        for key in [key for key in self._seen if key[1] not in live]:
            del self._seen[key]


def _forwards(entry: Any) -> bool:
    """Whether a raw entry without a finish reason makes a forward happen: a segment's end, or a KV-ready mark.

    Read from the raw output, like errors and swallowed terminals: they leave no processed object behind.
    """
    if getattr(entry, "is_segment_finished", False):
        return True
    kv_params = entry.kv_transfer_params
    return isinstance(kv_params, dict) and bool(kv_params.get("kv_ready"))


def _elements(value: Any) -> int:
    """How many elements a modality value has: a tensor's, those of a list of tensors, or a length."""
    if value is None:
        return 0
    numel = getattr(value, "numel", None)
    if numel is not None:
        return int(numel())
    if isinstance(value, (list, tuple)):
        return sum(_elements(each) for each in value)
    try:
        return len(value)
    except TypeError:  # a scalar
        return 1
