"""Inter-token latencies of a request without adding up all of them at each output."""

from __future__ import annotations

from typing import Any

from omni_fastpath.ledger import runtime

_runtime = runtime("lean_processing")
_adding_up = _runtime.guard("adding up latencies")

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
        try:
            self[:] = (sample,)
            self.all.append(sample)
        except Exception as error:
            _runtime.fail("keeping a latency", error)
            self.all.append(sample)

    def cut(self, count: int) -> None:
        """Keep so many."""
        del self.all[count:]
        self[:] = self.all[-1:]


class Records(dict[str, dict[str, Any]]):
    """A processor's records of text metrics by request, in the place of upstream's dict.

    Upstream makes a record with ``setdefault`` and takes it out with ``pop``. What comes out is equal to upstream's
    own record: the mean is the same expression on the same numbers in the same order.
    """

    def setdefault(self, name: str, default: Any = None, /) -> Any:
        """A request's record; a new one gets ``Samples``."""
        try:
            if name not in self and default.get(_SAMPLES) == []:
                default[_SAMPLES] = Samples()
        except Exception as error:
            _runtime.fail("making a record of latencies", error)
        return super().setdefault(name, default)

    def pop(self, name: str, /, *default: Any) -> Any:
        """Take a record out, with all samples and their mean."""
        record = super().pop(name, *default)
        for _ in range(2):  # again after an error of ours: it takes nothing back
            with _adding_up:
                return _whole(record)
        return record


def _whole(record: Any) -> Any:
    """The record with all samples and their mean."""
    samples = record.get(_SAMPLES) if record else None
    if isinstance(samples, Samples):
        if samples.all:
            record[_MEAN] = sum(samples.all) / float(len(samples.all))
        record[_SAMPLES] = samples.all
    return record
