"""vLLM's messages in msgpack, without vLLM: where a field stands is told by the server, which has the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

RAW_VIEW = 3
"""vLLM's extension code of bytes that stand in the message itself (``vllm/v1/serial_utils.py``)."""

INLINE_BYTES = 256
"""Tensors from this size on have a frame of their own (``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``)."""

Frames = list[bytes | memoryview]


class Layout(msgspec.Struct):
    """Fields of a structure that is sent as an array: their names in order, and what stands where nothing is set."""

    names: list[str]
    defaults: list[Any]


class Record:
    """Makes arrays of a layout out of a few fields that are always given, in this order.

    A field that the layout does not have is left out: releases differ.
    """

    def __init__(self, layout: Layout, *names: str) -> None:
        self._defaults = list(layout.defaults)
        self._places = [layout.names.index(name) if name in layout.names else None for name in names]
        self._end = max(place for place in self._places if place is not None) + 1

    def make(self, *values: Any) -> list[Any]:
        """The array, with these values and everything else at its default; as short as the last field allows."""
        found = self._defaults[: self._end]
        for place, value in zip(self._places, values, strict=True):
            if place is not None:
                found[place] = value
        return found


class Encoder:
    """Encodes messages with tensors in them, as vLLM's own does."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._frames: Frames = []

    def tensor(self, dtype: str, array: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], Any]:
        """What stands in the message for a tensor; *dtype* is torch's name."""
        data = np.ascontiguousarray(array)
        if data.nbytes < INLINE_BYTES:
            return dtype, array.shape, msgspec.msgpack.Ext(RAW_VIEW, data.tobytes())
        self._frames.append(data.data.cast("B"))
        return dtype, array.shape, len(self._frames)

    def encode(self, message: Any) -> Frames:
        """The frames of a message whose tensors were made since the last one."""
        frames, self._frames = self._frames, []
        return [self._encoder.encode(message), *frames]


class Request(msgspec.Struct):
    """What a stage is asked.

    Attributes:
        id: As the engine's client knows it.
        stream: The same in every stage.
        client: Which client's; outputs go to it.
        prompt: Token ids.
        params: Fields of the sampling parameters that are not at their default.
        information: Upstream's ``additional_information``, flat.
    """

    id: str
    stream: str
    client: int
    prompt: list[int]
    params: Mapping[str, Any]
    information: Mapping[str, Any]


class Decoder:
    """Decodes requests; tensors in them are not looked at."""

    def __init__(self, request: Layout) -> None:
        self._layout = request
        self._decoder = msgspec.msgpack.Decoder(ext_hook=lambda _code, _data: None)
        self.plain = self._decoder.decode
        """Decodes what has no structure: aborts and utility calls."""

    def request(self, frame: bytes) -> Request:
        """Decode one request from its first frame.

        Raises:
            ValueError: It is nothing that a light engine can serve.
        """
        values: Sequence[Any] = self._decoder.decode(frame)
        fields = dict(zip(self._layout.names, values, strict=False))
        if fields["sampling_params"] is None:
            raise ValueError(f"request {fields['request_id']}: light engines generate; it is a pooling request")
        if fields["prompt_token_ids"] is None:
            raise ValueError(f"request {fields['request_id']}: light engines need the prompt's token ids")
        return Request(
            id=fields["request_id"],
            stream=fields.get("external_req_id") or fields["request_id"],
            client=fields.get("client_index") or 0,
            prompt=fields["prompt_token_ids"],
            params=fields["sampling_params"],
            information=_information(fields.get("additional_information")),
        )


def _information(payload: Any) -> dict[str, Any]:
    """``AdditionalInformationPayload`` as a flat mapping, without tensors."""
    found = {}
    for name, entry in ((payload or {}).get("entries") or {}).items():
        value = entry.get("list_data")
        found[name] = entry.get("scalar_data") if value is None else value
    return {name: value for name, value in found.items() if value is not None}
