"""The default policy: which raw outputs have something for the user or the next stage, and so end a pass.

It does not depend on whether there is an output object, because upstream makes one for nearly every step, and every
later one repeats the keys that are never drained (``sr``, hidden states, codes). It reads no field of a specific model.
"""

from __future__ import annotations

from typing import Any

from omni_fastpath.hooks.specs import RawOutputView

from .upstream import DRAINABLE, RequestOutputKind


def is_routable(view: RawOutputView) -> bool:
    """Whether a raw output is terminal or an error, causes a forward, or has something new for the user.

    For a DELTA request that is text, token ids or a modality with elements in this output. For any other request it is
    any output.
    """
    for entry in view.raw_outputs.outputs:
        if entry.finish_reason is not None or _forwards(entry):
            return True
    return any(_is_new(view, output) for output in view.processed)


def _is_new(view: RawOutputView, output: Any) -> bool:
    if output.finished or getattr(output, "error", None) is not None:
        return True
    state = view.request_states.get(output.request_id)
    if state is None or not view.final_output:  # upstream drops the former, and users do not receive the latter
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
    """Whether a raw entry without a finish reason causes a forward: a segment's end or a KV-ready mark.

    This is read from the raw output, as are errors and swallowed terminals, because none of them has a processed
    output.
    """
    if getattr(entry, "is_segment_finished", False):
        return True
    kv_params = entry.kv_transfer_params
    return isinstance(kv_params, dict) and bool(kv_params.get("kv_ready"))


def _has_elements(value: Any) -> bool:
    """Whether the value of a modality (a tensor, a list of them, anything with a length) is not empty."""
    if isinstance(value, (list, tuple)):
        return any(_has_elements(each) for each in value)
    numel = getattr(value, "numel", None)
    if numel is not None:
        return int(numel()) > 0
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
