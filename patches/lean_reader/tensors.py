"""A tensor out of a message's bytes: upstream's ``MsgpackDecoder._decode_tensor`` in one step instead of four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec import msgpack

from omni_fastpath.ledger import runtime

from .aside import step_aside

_runtime = runtime("lean_reader")
_counters = _runtime.counters

_BOTH = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_NUMPYS = {name: np.dtype(name) for name in _BOTH}
_TORCHS: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_BOTH, "bfloat16")}


def decodes_as_upstream(decoder: Any) -> bool:
    """Whether a decoder's tensors come in the message, and share its memory where upstream's do."""
    return decoder.share_mem and decoder.oob_tensor_provider is None


def make_lean(decoder: Any) -> None:
    """Let ``decoder.decode`` make its tensors with ours.

    Args:
        decoder: A ``MsgpackDecoder`` of upstream's.
    """
    decoder.decoder = msgpack.Decoder(decoder.decoder.type, ext_hook=decoder.ext_hook, dec_hook=_hook(decoder))


def _hook(decoder: Any) -> Callable[[type, Any], Any]:
    def hook(kind: type, raw: Any) -> Any:
        if kind is not torch.Tensor or _runtime.has_failed:
            return decoder.dec_hook(kind, raw)
        try:
            tensor = _tensor(decoder, raw)
        except Exception as error:
            found = decoder.dec_hook(kind, raw)  # what upstream does not decode either raises upstream's error
            step_aside("making a tensor", error)
            return found
        if tensor is None:
            return decoder.dec_hook(kind, raw)
        _counters["tensors"] += 1
        return tensor

    return hook


def _tensor(decoder: Any, raw: Any) -> torch.Tensor | None:
    """The tensor; None where upstream shall make it, or say that it cannot be made."""
    name, shape, data = raw
    if type(data) is memoryview:  # in the message itself, which is not kept: copied
        numpys = _NUMPYS.get(name)
        if numpys is None:
            return None
        if not data.nbytes:
            return torch.empty(shape, dtype=_TORCHS[name]) if 0 in shape else None
        array = np.ndarray(shape, numpys, bytearray(data)) if data.nbytes >= numpys.itemsize else None
        return torch.from_numpy(array) if array is not None and array.nbytes == data.nbytes else None
    if type(data) is int and (torchs := _TORCHS.get(name)) is not None:
        buffer = memoryview(decoder.aux_buffers[data])  # a part of its own, which lives as long as the tensor
        if buffer.nbytes:
            flat = torch.frombuffer(buffer, dtype=torchs)
            return flat if [*flat.shape] == shape else flat.view(shape)
    return None
