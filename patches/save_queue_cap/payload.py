"""What a payload that waits keeps alive: a copy of its own where it would be a view of the runner's memory.

What upstream's runner hands over (``gpu_ar_model_runner``, ``mm_outputs``, ``prefix_cache``): on a GPU every step's
outputs come to main memory of their own, new at each step, and a request's payload is a part of it: nothing writes into
it later, but it keeps the whole batch alive. Where the device's memory is main memory ``.to("cpu")`` moves nothing, and
the payload is the runner's own buffer, which the next step writes over.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(slots=True)
class _Bytes:
    """A tensor's content while it waits. Every operation of torch gives the interpreter's lock away; bytes do not."""

    data: bytearray
    dtype: torch.dtype
    shape: torch.Size


class OwnedPayload(dict[str, Any]):
    """A payload of which `own` has copied something; `restored` makes it what it was."""


def own(payload: Any, *, all_tensors: bool) -> tuple[Any, int, int]:
    """Copy tensors in main memory that are parts of something larger. Upstream's containers are not changed.

    Tensors on a device stay there, and so do tensors without plain storage.

    Args:
        payload: A flat or nested payload of tensors and plain values, or none.
        all_tensors: Copy those too that have memory of their own: the runner may write into it.

    Returns:
        The payload, an `OwnedPayload` where something was copied; bytes of its tensors; how many were copied.
    """
    if not isinstance(payload, dict):
        return payload, 0, 0
    owner = _Owner(all_tensors)
    owned = {key: owner.own(value) for key, value in payload.items()}
    return (OwnedPayload(owned) if owner.copies else payload), owner.nbytes, owner.copies


@dataclass(slots=True)
class _Owner:
    """Goes through one payload."""

    all_tensors: bool
    nbytes: int = 0
    copies: int = 0

    def own(self, value: Any) -> Any:
        """The value, copied where it must be."""
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return value
            nbytes = value.nbytes
            self.nbytes += nbytes
            if not value.is_cpu or not (self.all_tensors or 2 * nbytes < value.untyped_storage().nbytes()):
                return value
            self.copies += 1
            return _copied(value, nbytes)
        if isinstance(value, dict):
            return {key: self.own(each) for key, each in value.items()}
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(map(self.own, value))
        return value


def _copied(tensor: torch.Tensor, nbytes: int) -> torch.Tensor | _Bytes:
    if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj() or tensor.dtype not in _PLAIN:
        return tensor.clone()
    data = bytearray((ctypes.c_char * nbytes).from_address(tensor.data_ptr())) if nbytes else bytearray()
    return _Bytes(data, tensor.dtype, tensor.shape)


def restored(payload: Any) -> Any:
    """The payload with tensors where `own` put their content."""
    if isinstance(payload, _Bytes):
        if not payload.data:
            return torch.empty(payload.shape, dtype=payload.dtype)
        return torch.frombuffer(payload.data, dtype=payload.dtype).reshape(payload.shape)
    if isinstance(payload, dict):
        return {key: restored(each) for key, each in payload.items()}
    if isinstance(payload, list) or type(payload) is tuple:
        return type(payload)(restored(each) for each in payload)
    return payload
