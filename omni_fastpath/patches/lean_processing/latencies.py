"""Inter-token latencies of a request, without summing all of them for each output."""

from __future__ import annotations

from typing import Any

from omni_fastpath.ledger import state_of

_patch = state_of("lean_processing")
_summing = _patch.guard("summing latencies")

_SAMPLES, _MEAN = "vllm_itls_ms", "vllm_itl_ms"
"""Keys of upstream's record."""


class Samples(list[float]):
    """The samples of one request. It keeps all of them, and as a list has only the last one while the request runs.

    For each output upstream appends a sample and takes the mean of the list, which is not read before the stage ends.
    With this list it is the mean of one sample. Upstream also checks whether the list is empty, which is the same.

    Attributes:
        all: Every sample, in milliseconds, in order.
    """

    __slots__ = ("all",)

    def __init__(self) -> None:
        super().__init__()
        self.all: list[float] = []

    def append(self, sample: float, /) -> None:
        """Keep a sample, which replaces the previous one in the list."""
        self[:] = (sample,)
        self.all.append(sample)

    def cut(self, count: int) -> None:
        """Keep the first samples, *count* of them."""
        del self.all[count:]
        self[:] = self.all[-1:]


class Records(dict[str, dict[str, Any]]):
    """A processor's records of text metrics by request. Replaces upstream's dict.

    Upstream makes a record with ``setdefault`` and removes it with ``pop``. A removed record equals upstream's own,
    because the mean is the same expression on the same numbers in the same order.
    """

    def setdefault(self, name: str, default: Any = None, /) -> Any:
        """A request's record. A new one gets ``Samples``."""
        try:
            if name not in self and default.get(_SAMPLES) == []:
                default[_SAMPLES] = Samples()
        except Exception as error:
            _patch.fail("making a record of latencies", error)
        return super().setdefault(name, default)

    def pop(self, name: str, /, *default: Any) -> Any:
        """Remove a record, with all samples and their mean."""
        record = super().pop(name, *default)
        for _ in range(2):  # again after an exception, because it can be repeated
            with _summing:
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
