"""Inter-token latencies of a request without adding up all of them at each output."""

from __future__ import annotations

from typing import Any

_SAMPLES, _MEAN = "vllm_itls_ms", "vllm_itl_ms"
"""Keys of upstream's record."""


class Samples(list[float]):
    """The samples of one request: keeps all of them, and shows only the last one while the request runs.

    Upstream appends a sample at each output and takes the mean of the list, which is read when the stage ends and not
    before. Here the mean is that of one sample; whether the list is empty, which upstream also asks, stays as it was.

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
        self[:] = (sample,)


class Records(dict[str, dict[str, Any]]):
    """A processor's records of text metrics by request, in the place of upstream's dict.

    Upstream makes a record with ``setdefault`` and takes it out with ``pop``. What comes out is equal to upstream's
    own record: the mean is the same expression on the same numbers in the same order.
    """

    def setdefault(self, name: str, default: Any = None, /) -> Any:
        """A request's record; a new one gets ``Samples``."""
        record = self.get(name)
        if record is None:
            record = self[name] = default
            if record.get(_SAMPLES) == []:
                record[_SAMPLES] = Samples()
        return record

    def pop(self, name: str, /, *default: Any) -> Any:
        """Take a record out, with all samples and their mean."""
        record = super().pop(name, *default)
        samples = record.get(_SAMPLES) if record else None
        if isinstance(samples, Samples):
            every = record[_SAMPLES] = samples.all
            if every:
                record[_MEAN] = sum(every) / float(len(every))
        return record
