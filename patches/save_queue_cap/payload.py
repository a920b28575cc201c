"""What the queue holds of a payload: how many bytes, and a copy of its own where that is needed.

What upstream's runner of 0.30 hands over (``gpu_ar_model_runner``, ``mm_outputs``, ``prefix_cache``), and so what must
be copied:

- On a GPU every step's outputs come to main memory of their own: with asynchronous outputs (Qwen3-Omni) a new pinned
  tensor for each, which PyTorch uses again only when the last view of it is gone; else what ``.to("cpu")`` makes; with
  the prefix cache a clone of what was staged. A request's payload is a part of it, ``element[start:end]``: nothing
  writes into it later, but it keeps the whole step's batch alive. So it may wait as it is; what has waited while most
  of its batch has left is copied to let the batch go (`thin`).
- Where the device's memory is main memory, ``.to("cpu")`` moves nothing: a payload is the runner's own buffer, and what
  waits when the next step begins must be the queue's by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

Weight = Mapping[int, tuple[int, int]]
"""Of each storage that a payload keeps alive, by address: its bytes, and how many of them the payload's tensors are."""

NO_BYTES: Weight = MappingProxyType({})


@dataclass(slots=True)
class Kept:
    """A tensor's content while it waits. Every operation of torch gives the interpreter's lock away; bytes do not."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


class KeptPayload(dict[str, Any]):
    """A payload of which `keep` has copied something; `give` makes it what it was."""


def weigh(payload: Any) -> Weight:
    """The memory that a payload keeps alive; views of one storage are one."""
    if payload is None:
        return NO_BYTES
    found: dict[int, tuple[int, int]] = {}
    left = [payload]  # no recursion: this runs once a task
    for value in left:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:  # another has no storage to look at
                storage = value.untyped_storage()
                address, nbytes = storage.data_ptr(), storage.nbytes()
                before = found.get(address)
                viewed = value.nbytes if before is None else before[1] + value.nbytes
                found[address] = (nbytes, min(nbytes, viewed))
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        elif isinstance(value, Kept):
            found[id(value.data)] = (len(value.data), len(value.data))
    return found


def keep(payload: Any, wanted: Callable[[int], bool] | None = None) -> tuple[Any, int]:
    """Copy tensors in main memory, so that nobody writes into them and they keep nothing else alive.

    The containers that upstream made are not changed: the client's copy of the output may be the same object. Tensors
    on a device stay there, and so do tensors without plain storage.

    Args:
        payload: A flat or nested payload of tensors and plain values, or none.
        wanted: Given the address of a tensor's storage, whether it is copied; all are without it.

    Returns:
        The payload, a `KeptPayload` where something was copied, and how many tensors were.
    """
    if not isinstance(payload, dict):
        return payload, 0
    kept, copies = _keep(payload, wanted)
    return (KeptPayload(kept), copies) if copies else (payload, 0)


def _keep(value: Any, wanted: Callable[[int], bool] | None) -> tuple[Any, int]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or not value.is_cpu:
            return value, 0
        if wanted is not None and not wanted(value.untyped_storage().data_ptr()):
            return value, 0
        return _kept(value), 1
    if isinstance(value, dict):
        pairs = {key: _keep(each, wanted) for key, each in value.items()}
        return {key: each for key, (each, _) in pairs.items()}, sum(copies for _, copies in pairs.values())
    if isinstance(value, list) or type(value) is tuple:
        found = [_keep(each, wanted) for each in value]
        return type(value)(each for each, _ in found), sum(copies for _, copies in found)
    return value, 0


def give(payload: Any) -> Any:
    """The payload with tensors where `keep` put their content."""
    if isinstance(payload, Kept):
        if not payload.data:
            return torch.empty(payload.shape, dtype=payload.dtype)
        return torch.frombuffer(bytearray(payload.data), dtype=payload.dtype).reshape(payload.shape)
    if isinstance(payload, dict):
        return {key: give(each) for key, each in payload.items()}
    if isinstance(payload, list) or type(payload) is tuple:
        return type(payload)(give(each) for each in payload)
    return payload


def _kept(tensor: torch.Tensor) -> torch.Tensor | Kept:
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj() or tensor.dtype not in _PLAIN:
        return tensor.clone()
    return Kept(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape))


_PLAIN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""What ``torch.frombuffer`` gives back as it was."""
