"""``/metrics``: all patches in all processes of a server, in one scrape of any of its API processes.

The thread that updates this process's state file (``omni_fastpath.statefile``) also collects the metrics: those of this
process from its ledger, and those of the server's other processes from their state files. A scrape returns the
last collection and reads no file. The label ``process`` is upstream's name of a process, or ``server``. ``stage`` and
``replica`` are empty if a process belongs to no stage.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omni_fastpath import process_role, statefile, threads
from omni_fastpath.declare import Metric, Patch, Process
from omni_fastpath.ledger import LEDGER, Ledger, warn_once
from omni_fastpath.seams import MARK, is_ours

API_WORKER = re.compile(r"ApiServer_\d+$")
"""vLLM's names of the processes of ``--api-server-count``. Their parent starts the stages and serves no request."""

_MAIN = "MainProcess"
_OF_PROCESS = ("process", "stage", "replica")
_LABELS = ("patch", *_OF_PROCESS)
_STATE_LABELS = (*_LABELS, "state", "same_as")

_Where = tuple[str, str, str]
"""The values of ``_OF_PROCESS``."""


class Collector:
    """The metrics of this server, for prometheus_client.

    Args:
        ledger: The ledger of this process.
        process: The kind of this process.
    """

    def __init__(self, ledger: Ledger, process: Process) -> None:
        self._ledger = ledger
        self._role = process.value
        self._own = _where(process.value, multiprocessing.current_process().name, None, None)
        self._collected: list[Any] = []

    def collect(self) -> list[Any]:
        """The metric families of the last ``refresh``."""
        return self._collected

    def refresh(self) -> None:
        """Collect all processes. If the state files cannot be read, only this process. After an error, nothing."""
        try:
            self._collected = self._tree()
        except Exception as error:
            warn_once(f"/metrics lacks the patches: {error}")
            self._collected = []

    def _tree(self) -> list[Any]:
        mine = {"pid": os.getpid(), "threads": threads.own(), "role": self._role}
        processes = [(self._own, {**mine, "patches": self._ledger.snapshot()})]
        try:
            processes += list(_elsewhere())
        except Exception as error:
            warn_once(f"the state files cannot be read, so /metrics shows only this process: {error}")
        declared = {entry.patch.name: entry.patch for entry in self._ledger}
        families = (*_families(processes, declared), *_figure_families(processes, declared))
        return [family for family in families if family.samples]

    def describe(self) -> list[Any]:
        """An empty list, so that the registry does not compare names when this is registered."""
        return []


def export(process: Process) -> None:
    """Add the patches' metrics to every place where this process shows upstream's.

    These are in ``REGISTRY``. If prometheus_client was imported in its multiprocess mode, as in each of several API
    processes, they are also in its files, and upstream's ``/metrics`` is a registry that contains only a
    ``MultiProcessCollector``. So the metrics are added to that collector's.
    """
    collector = Collector(LEDGER, process)
    collector.refresh()
    statefile.BESIDE.append(collector.refresh)
    from prometheus_client import REGISTRY, values  # noqa: PLC0415 - only when something is on

    REGISTRY.register(collector)
    if values.ValueClass is values.MutexValue:  # the variable itself may have been set later, without effect
        return
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415
    from wrapt import FunctionWrapper  # noqa: PLC0415

    raw = vars(MultiProcessCollector)["collect"]
    if is_ours(raw):
        return

    def wrapped_collect(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Iterable[Any]:
        return itertools.chain(wrapped(*args, **kwargs), collector.collect())

    ours = FunctionWrapper(raw, wrapped_collect)
    setattr(ours, MARK, "metrics")
    MultiProcessCollector.collect = ours  # type: ignore[method-assign]


def _where(role: str, process_name: str, stage: int | None, replica: int | None) -> _Where:
    process = role if process_name == _MAIN else process_name
    return process, "" if stage is None else str(stage), "" if replica is None else str(replica)


def _root() -> int:
    """The root process of this server: this one, or the parent of several API processes."""
    parent = multiprocessing.parent_process()
    is_worker = parent is not None and API_WORKER.match(multiprocessing.current_process().name)
    return parent.pid if parent is not None and is_worker and parent.pid else os.getpid()


@functools.lru_cache(maxsize=1024)
def _above(pid: int, _started: int) -> tuple[int, ...]:
    """The ancestors of a process when it was first seen. They are kept, because an ancestor may end earlier."""
    return tuple(process_role.ancestors(pid))


def _elsewhere() -> Iterator[tuple[_Where, dict[str, Any]]]:
    """The state files of the server's other processes."""
    root = _root()
    snapshots = {snapshot["pid"]: snapshot for snapshot in statefile.read_live()}
    for pid, snapshot in snapshots.items():
        above = _above(pid, snapshot["started"])
        if pid == os.getpid() or root not in (pid, *above):
            continue
        # A stage's worker gets its stage from the engine process, its ancestor.
        line = [snapshot, *(snapshots[each] for each in above if each in snapshots)]
        stage, replica = next(((s["stage"], s["replica"]) for s in line if s["stage"] is not None), (None, None))
        yield _where(snapshot["role"], snapshot["process_name"], stage, replica), snapshot


_Processes = Iterable[tuple[_Where, Mapping[str, Any]]]
_Labels = tuple[str, ...]


def _families(processes: _Processes, declared: Mapping[str, Patch]) -> list[Any]:
    """States, counters, maxima, and the processor time of the threads that each API process names.

    Counts and times with the same labels are added. Every process exports the state of every patch, but only the
    counters of patches for its kind of process.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    found: list[dict[_Labels, float]] = [defaultdict(float) for _ in range(4)]
    states, counts, greatest, times = found
    for where, snapshot in processes:
        for name, seconds in threads.used(snapshot["pid"], snapshot.get("threads") or {}).items():
            times[(*where, name)] += seconds
        for name, record in snapshot["patches"].items():
            labels = (name, *where)
            states[(*labels, record["state"], record.get("same_as", ""))] = 1
            patch = declared.get(name)
            if patch is not None and Process(snapshot["role"]) not in patch.processes:
                continue
            maxima = {each.name for each in patch.counters if each.is_maximum} if patch is not None else set()
            for event, count in record["counters"].items():
                if event in maxima:
                    greatest[(*labels, event)] = max(greatest[(*labels, event)], count)
                else:
                    counts[(*labels, event)] += count
    of_threads = "Processor time of the threads of front ends and orchestrators"
    families: list[Any] = [
        GaugeMetricFamily("omni_fastpath_patch_state", "1 for the patch's state", labels=_STATE_LABELS),
        CounterMetricFamily("omni_fastpath_events", "Engagement counters", labels=[*_LABELS, "event"]),
        GaugeMetricFamily("omni_fastpath_greatest", "Greatest values seen", labels=[*_LABELS, "value"]),
        CounterMetricFamily("omni_fastpath_thread_cpu_seconds", of_threads, labels=[*_OF_PROCESS, "thread"]),
    ]
    for family, samples in zip(families, found, strict=True):
        for key, value in samples.items():
            family.add_metric(key, value)
    return families


def _figure_families(processes: _Processes, declared: Mapping[str, Patch]) -> Iterator[Any]:
    """The families of the patches' metrics. Samples with the same labels are added."""
    for name, patch in declared.items():
        for metric in patch.metrics:
            found: dict[_Labels, list[Mapping[str, Any]]] = {}
            for where, snapshot in processes:
                for sample in snapshot["patches"].get(name, {}).get("figures", {}).get(metric.name, ()):
                    of_sample = {**dict(zip(_OF_PROCESS, where, strict=True)), **sample["labels"]}
                    labels = tuple(of_sample.get(label, "") for label in (*_OF_PROCESS, *metric.labels))
                    found.setdefault(labels, []).append(sample)
            yield _figure_family(metric, found)


def _figure_family(metric: Metric, found: Mapping[_Labels, list[Mapping[str, Any]]]) -> Any:
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily  # noqa: PLC0415
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    names = [*_OF_PROCESS, *metric.labels]
    if metric.bounds is None:
        gauge = GaugeMetricFamily(metric.name, metric.meaning, labels=names)
        for labels, samples in found.items():
            gauge.add_metric(labels, sum(sample["value"] for sample in samples))
        return gauge
    ends = [floatToGoString(each) for each in (*metric.bounds, float("inf"))]  # type: ignore[no-untyped-call]
    histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=names)
    for labels, samples in found.items():
        alike = [sample for sample in samples if len(sample["counts"]) == len(ends)]  # else another version's
        if alike:
            counts = [sum(bucket) for bucket in zip(*(sample["counts"] for sample in alike), strict=True)]
            buckets = list(zip(ends, itertools.accumulate(counts), strict=True))
            histogram.add_metric(labels, buckets, sum(sample["sum"] for sample in alike))
    return histogram
