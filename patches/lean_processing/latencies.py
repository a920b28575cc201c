"""Inter-token latencies of a request without adding all of them up again at each output."""

from __future__ import annotations

from typing import Any

_SAMPLES, _MEAN = "vllm_itls_ms", "vllm_itl_ms"
"""Keys of upstream's record."""


class Samples(list[float]):
    """The samples of one request: keeps all, and shows the last one alone while the request runs.

    Upstream appends a sample at each output and then takes the mean of all, which is read when the stage ends and never
    before. What it takes the mean of here is one sample; whether there is any, which it also asks, is as it was.

    Attributes:
        all: Every sample, in milliseconds, in the order in which they came.
    """

    __slots__ = ("all",)

    def __init__(self) -> None:
        super().__init__()
        self.all: list[float] = []

    def append(self, sample: float, /) -> None:
        """Keep a sample, and show it in the place of the one before."""
        self.all.append(sample)
        if self:
            self[0] = sample
        else:
            super().append(sample)


class Records(dict[str, dict[str, Any]]):
    """A processor's records of text metrics by request, in the place of upstream's dict.

    Upstream makes a record with ``setdefault`` and takes it out with ``pop``, to read it or to forget it, and reaches
    it in no other way. What comes out is what upstream's would be, the mean included: the same sum in the same order.
    """

    def setdefault(self, name: str, default: dict[str, Any] | None = None, /) -> Any:
        """A request's record; a new one gets samples of ours."""
        record = self.get(name)
        if record is None:
            record = self[name] = {} if default is None else default
            if record.get(_SAMPLES) == []:
                record[_SAMPLES] = Samples()
        return record

    def pop(self, name: str, /, *default: Any) -> Any:
        """Take a record out, as upstream's would be."""
        record = super().pop(name, *default)
        samples = record.get(_SAMPLES) if record else None
        if isinstance(samples, Samples):
            every = record[_SAMPLES] = samples.all
            if every:
                record[_MEAN] = sum(every) / float(len(every))
        return record
