"""What the queue holds of a payload: how many bytes, and a copy of its own where it must wait."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class Kept:
    """A tensor's content while it waits."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def weigh(payload: Any, *, keep_all: bool = False) -> tuple[Mapping[int, int], bool]:
    """The memory that a payload keeps alive, and whether ``keep`` would copy any of it.

    Returns:
        Address and bytes; views of one storage are one.
    """
    if payload is None:
        return _NOTHING, False
    found: dict[int, int] = {}
    to_keep = False
    left = [payload]  # no recursion: this runs once a task
    for value in left:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:  # another has no storage to look at
                storage = value.untyped_storage()
                found[storage.data_ptr()] = nbytes = storage.nbytes()
                to_keep = to_keep or _is_anothers(value, nbytes, keep_all)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        elif isinstance(value, Kept):
            found[id(value.data)] = len(value.data)
    return found, to_keep


def keep(payload: Any, *, keep_all: bool) -> tuple[Any, int]:
    """Make a payload safe to hold while the runner goes on; ``give`` makes it what it was.

    A tensor that is a part of a larger storage, or that lies in pinned memory, may be overwritten by the next step, and
    keeps the whole storage alive meanwhile: its content is copied. Upstream's runner moves its outputs from the device
    to memory of their own, so that other tensors in main memory are nobody else's; on a device whose memory *is* main
    memory that move is none, hence ``keep_all``. Tensors on a device stay there, and so do tensors without plain
    storage. The containers that upstream made are not changed: the client's copy of the output may be the same object.

    Args:
        payload: Nested dicts, lists and tuples of tensors and plain values.
        keep_all: Copy every tensor in main memory.

    Returns:
        The payload and how many tensors of it were copied.
    """
    if isinstance(payload, torch.Tensor):
        return (_kept(payload), 1) if _is_to_keep(payload, keep_all) else (payload, 0)
    if isinstance(payload, dict):
        kept = {key: keep(each, keep_all=keep_all) for key, each in payload.items()}
        return {key: value for key, (value, _) in kept.items()}, sum(copies for _, copies in kept.values())
    if isinstance(payload, list) or type(payload) is tuple:
        each_kept = [keep(each, keep_all=keep_all) for each in payload]
        return type(payload)(value for value, _ in each_kept), sum(copies for _, copies in each_kept)
    return payload, 0


def give(payload: Any) -> Any:
    """The payload with tensors where ``keep`` put their content."""
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
    if not tensor.is_contiguous():
        return tensor.clone()
    # Every operation of torch gives the interpreter's lock away, for milliseconds where the save thread waits for it;
    # this runs on the scheduler's thread, once for each tensor that waits.
    return Kept(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape))


def _is_to_keep(tensor: torch.Tensor, keep_all: bool) -> bool:
    return tensor.layout is torch.strided and _is_anothers(tensor, tensor.untyped_storage().nbytes(), keep_all)


def _is_anothers(tensor: torch.Tensor, storage_nbytes: int, keep_all: bool) -> bool:
    if not tensor.is_cpu:
        return False
    return keep_all or storage_nbytes != tensor.nbytes or _is_pinned(tensor)


def _is_pinned(tensor: torch.Tensor) -> bool:
    # Asking would open a context on the device in a process that has none; then nobody here has pinned anything.
    return bool(torch.cuda.is_initialized() and tensor.is_pinned())
