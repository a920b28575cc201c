"""The size of a payload, and the copy of one that would keep or share memory of the runner.

Payloads are made by upstream's runner (``gpu_ar_model_runner``, ``mm_outputs``, ``prefix_cache``). On a GPU the outputs
of every step are moved to new main memory, and a request's payload is a part of it. Nothing writes into it later, but
it keeps the whole batch alive. If the device's memory is main memory, ``.to("cpu")`` moves nothing, and the payload is
the runner's own buffer, which the next step overwrites.
"""

from __future__ import annotations

from typing import Any

import torch


def weigh(payload: Any, *, kept: bool = False) -> int:
    """Bytes of the tensors in a flat or nested payload of tensors and plain values, or of the memory that they keep."""
    values, nbytes = [payload], 0
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                nbytes += value.untyped_storage().nbytes() if kept else value.nbytes
        elif isinstance(value, (dict, list, tuple)):
            values += value.values() if isinstance(value, dict) else value
    return nbytes


def own(value: Any, *, all_tensors: bool) -> Any:
    """The payload with copies of those tensors in main memory that are parts of something larger.

    Upstream's containers are not changed. Tensors on a device, and tensors without plain storage, are not copied.

    Args:
        value: A payload, as above.
        all_tensors: Also copy tensors with memory of their own, into which the runner may write.
    """
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and value.is_cpu
        is_shared = is_plain and (all_tensors or 2 * value.nbytes < value.untyped_storage().nbytes())
        return value.clone() if is_shared else value
    if isinstance(value, dict):
        return {key: own(each, all_tensors=all_tensors) for key, each in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(own(each, all_tensors=all_tensors) for each in value)
    return value
