"""What a payload that waits weighs, and what it keeps alive: a copy where it would be a view of the runner's memory.

What upstream's runner hands over (``gpu_ar_model_runner``, ``mm_outputs``, ``prefix_cache``): on a GPU every step's
outputs come to main memory of their own, new at each step, and a request's payload is a part of it: nothing writes into
it later, but it keeps the whole batch alive. Where the device's memory is main memory ``.to("cpu")`` moves nothing, and
the payload is the runner's own buffer, which the next step writes over.
"""

from __future__ import annotations

from typing import Any

import torch


def weigh(value: Any) -> int:
    """Bytes of the tensors in a flat or nested payload of tensors and plain values, or none."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, dict):
        return sum(map(weigh, value.values()))
    return sum(map(weigh, value)) if isinstance(value, (list, tuple)) else 0


def own(value: Any, *, all_tensors: bool) -> Any:
    """The payload with copies of tensors in main memory that are parts of something larger.

    Upstream's containers are not changed. Tensors on a device stay there, and so do tensors without plain storage.

    Args:
        value: As above.
        all_tensors: Copy those too that have memory of their own: the runner may write into it.
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
