"""The default policy: which raw output brings somebody something, and so ends a pass.

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
        """Whether this raw output is routable."""
        routable = any(_changes_the_request(entry) for entry in view.raw_outputs.outputs)
        for output in view.processed:
            # No early exit: the records of a CUMULATIVE request must see each of its outputs.
            routable |= self._brings_something(view, output)
        return routable

    def _brings_something(self, view: RawOutputView, output: Any) -> bool:
        if getattr(output, "error", None) is not None:
            return True
        state = view.request_states.get(output.request_id)
        if state is None:  # upstream drops it
            self._seen.pop((view.stage_id, output.request_id), None)
            return False
        if not view.final_output:
            return bool(output.finished)
        kind = getattr(state.sampling_params_list[view.stage_id], "output_kind", None)
        if kind == self._delta:
            return bool(output.finished) or any(self._has_elements(completion) for completion in output.outputs)
        if kind == self._cumulative:
            return self._has_grown(view, output)
        return True

    def _has_elements(self, completion: Any) -> bool:
        if completion.text or completion.token_ids:
            return True
        return any(_elements(value) for value in self._modalities(completion))

    def _has_grown(self, view: RawOutputView, output: Any) -> bool:
        key = view.stage_id, output.request_id
        if output.finished:
            self._seen.pop(key, None)
            return True
        sizes = tuple(size for completion in output.outputs for size in self._sizes(completion))
        before = self._seen.get(key, ())
        self._seen[key] = sizes
        if len(self._seen) > 2 * len(view.request_states) + 64:
            self._forget_ended(view.request_states)
        return any(size > (before[i] if i < len(before) else 0) for i, size in enumerate(sizes))

    def _sizes(self, completion: Any) -> Sizes:
        values = tuple(_elements(value) for value in self._modalities(completion))
        return (len(completion.text), len(completion.token_ids), *values)

    def _modalities(self, completion: Any) -> tuple[Any, ...]:
        payload = getattr(completion, "multimodal_output", None)
        if not isinstance(payload, Mapping):
            return ()
        return tuple(payload.get(key) for key in self._drainable)

    def _forget_ended(self, live: Mapping[str, Any]) -> None:
        """Drop the records of requests that ended without a finished output of theirs (aborts, errors)."""
        for key in [key for key in self._seen if key[1] not in live]:
            del self._seen[key]

    @property
    def records(self) -> int:
        """How many requests' sizes are held."""
        return len(self._seen)


def _changes_the_request(entry: Any) -> bool:
    """Whether a raw entry is terminal, an error, a segment's end, or a KV-ready mark.

    Read from the raw output: swallowed terminals, errors and KV-ready marks leave no processed object behind.
    """
    if entry.finish_reason is not None or getattr(entry, "is_segment_finished", False):
        return True
    kv_params = getattr(entry, "kv_transfer_params", None)
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
