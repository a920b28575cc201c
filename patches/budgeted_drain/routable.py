"""The default policy: which raw output has something for the user or the next stage, and so ends a pass.

The policy does not check for an output object, because upstream makes one for nearly every step, and every later
snapshot repeats the keys that are never drained (``sr``, hidden states, codes). It reads no field of a specific model.
"""

from __future__ import annotations

from typing import Any

from omni_fastpath.hooks.specs import RawOutputView

from .upstream import DRAINABLE, RequestOutputKind


def is_routable(view: RawOutputView) -> bool:
    """Whether a raw output is terminal, an error, makes a forward happen, or brings the user something new.

    Of a DELTA request that is text, token ids or a modality with elements in this output; of any other, any output.
    """
    for entry in view.raw_outputs.outputs:
        if entry.finish_reason is not None or _forwards(entry):
            return True
    return any(_is_new(view, output) for output in view.processed)


def _is_new(view: RawOutputView, output: Any) -> bool:
    if output.finished or getattr(output, "error", None) is not None:
        return True
    state = view.request_states.get(output.request_id)
    if state is None or not view.final_output:  # upstream drops the first and shows no user the second
        return False
    if getattr(state.sampling_params_list[view.stage_id], "output_kind", None) is not RequestOutputKind.DELTA:
        return True
    for completion in output.outputs:
        if completion.text or completion.token_ids:
            return True
        payload = getattr(completion, "multimodal_output", None)
        if payload is not None and any(_has_elements(payload.get(key)) for key in DRAINABLE):
            return True
    return False


def _forwards(entry: Any) -> bool:
    """Whether a raw entry without a finish reason makes a forward happen: a segment's end, or a KV-ready mark.

    Read from the raw output, like errors and swallowed terminals: they leave no processed object behind.
    """
    if getattr(entry, "is_segment_finished", False):
        return True
    kv_params = entry.kv_transfer_params
    return isinstance(kv_params, dict) and bool(kv_params.get("kv_ready"))


def _has_elements(value: Any) -> bool:
    """Whether a modality value, a tensor, a list of them or anything with a length, is not empty."""
    if isinstance(value, (list, tuple)):
        return any(_has_elements(each) for each in value)
    numel = getattr(value, "numel", None)
    if numel is not None:
        return int(numel()) > 0
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
