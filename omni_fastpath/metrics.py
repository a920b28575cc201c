"""``/metrics``: every patch in every process of a server, in one scrape of any of its API processes.

This process is read from its ledger, the others of its tree from their state files: a scrape costs a few small files,
and nothing runs between scrapes. ``process`` is what upstream calls a process (the server's own is ``server``);
``stage`` and ``replica`` are empty where a process serves no stage.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from omni_fastpath import processid, statefile
from omni_fastpath.declare import Metric, Patch, Process, State
from omni_fastpath.ledger import LEDGER, Ledger, logger
from omni_fastpath.seams import MARK, is_ours

_API_WORKER = re.compile(r"ApiServer_\d+$")
"""What vllm calls the processes of ``--api-server-count``; their parent runs the stages and serves nobody."""

_MAIN = "MainProcess"
_OF_PROCESS = ("process", "stage", "replica")
_LABELS = ("patch", *_OF_PROCESS)


class _Where(NamedTuple):
    """A process by its labels."""

    process: str
    stage: str
    replica: str


class _Record(NamedTuple):
    """One patch in one process."""

    patch: str
    role: str
    where: _Where
    state: str
    counters: Mapping[str, int]


class _Figure(NamedTuple):
    """One sample of a patch's metric, in one process."""

    metric: str
    where: _Where
    sample: Mapping[str, Any]


class Collector:
    """Reads the tree when Prometheus is scraped; costs nothing otherwise, and never fails a scrape.

    Args:
        ledger: This process's.
        process: The kind of process this is.
    """

    def __init__(self, ledger: Ledger, process: Process) -> None:
        self._ledger = ledger
        self._role = process.value
        self._own = _where(process.value, multiprocessing.current_process().name, None, None)
        self._complained = False

    def collect(self) -> Iterable[Any]:
        """The metric families; of this process alone when the state files cannot be read."""
        try:
            processes = [(self._own, self._here())]
            try:
                processes += list(_elsewhere())
            except Exception as error:
                self._complain("the state files cannot be read, /metrics shows this process alone", error)
            records = [record for where, snapshot in processes for record in _records(where, snapshot)]
            figures = [found for where, snapshot in processes for found in _figures(where, snapshot)]
            declared = self._declared()
            return [*_families(records, declared), *_figure_families(figures, declared)]
        except Exception as error:
            self._complain("/metrics goes without the patches", error)
            return []

    def describe(self) -> list[Any]:
        """Nothing to check for duplicates at registration."""
        return []

    def _here(self) -> dict[str, Any]:
        """What a state file of this process would say now, as far as it is shown."""
        return {"role": self._role, "patches": self._ledger.snapshot()}

    def _declared(self) -> dict[str, Patch]:
        from omni_fastpath.patches import PATCHES  # noqa: PLC0415 - other processes may have patches that we have not

        return {patch.name: patch for patch in (*PATCHES, *(entry.patch for entry in self._ledger))}

    def _complain(self, what: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("omni-fastpath: %s: %s", what, error)


def export(process: Process) -> None:
    """Add the patches' states and counters to this process's ``/metrics``.

    With several API processes Prometheus runs in its multiprocess mode, in which upstream makes a registry for each
    scrape, with a ``MultiProcessCollector`` in it and nothing else: there ours follow what that one collects.
    """
    collector = Collector(LEDGER, process)
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        from prometheus_client import REGISTRY  # noqa: PLC0415 - only when something is on

        REGISTRY.register(collector)
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
    return _Where(process, "" if stage is None else str(stage), "" if replica is None else str(replica))


def _root() -> int:
    """The process whose tree is this server: this one, or the parent that several API processes share."""
    parent = multiprocessing.parent_process()
    is_worker = parent is not None and _API_WORKER.match(multiprocessing.current_process().name)
    return parent.pid if parent is not None and is_worker and parent.pid else os.getpid()


def _elsewhere() -> Iterator[tuple[_Where, dict[str, Any]]]:
    """The state files of the tree's other processes."""
    root = _root()
    snapshots = {snapshot["pid"]: snapshot for snapshot in statefile.read_live()}
    for pid, snapshot in snapshots.items():
        above = list(processid.ancestors(pid))
        if pid == os.getpid() or root not in (pid, *above):
            continue
        # A stage's worker has its stage from the engine process above it.
        line = [snapshot, *(snapshots[each] for each in above if each in snapshots)]
        stage, replica = next(((s["stage"], s["replica"]) for s in line if s["stage"] is not None), (None, None))
        yield _where(snapshot["role"], snapshot["process_name"], stage, replica), snapshot


def _records(where: _Where, snapshot: Mapping[str, Any]) -> Iterator[_Record]:
    for name, record in snapshot["patches"].items():
        yield _Record(name, snapshot["role"], where, record["state"], record["counters"])


def _figures(where: _Where, snapshot: Mapping[str, Any]) -> Iterator[_Figure]:
    for record in snapshot["patches"].values():
        for metric, samples in record.get("figures", {}).items():
            yield from (_Figure(metric, where, sample) for sample in samples)


def _figure_families(figures: Iterable[_Figure], declared: Mapping[str, Patch]) -> Iterator[Any]:
    """The families of the patches' metrics of which there is a sample; of equal labels they are added."""
    by_metric: dict[str, list[_Figure]] = {}
    for each in figures:
        by_metric.setdefault(each.metric, []).append(each)
    for metric in (metric for patch in declared.values() for metric in patch.metrics):
        found = by_metric.get(metric.name, [])
        if metric.bounds is None:
            family = _gauge_family(metric, found)
        else:
            counted = [(_labels(metric, each), each.sample["counts"], each.sample["sum"]) for each in found]
            family = _histogram(metric.name, metric.meaning, (*_OF_PROCESS, *metric.labels), metric.bounds, counted)
        if family.samples:
            yield family


def _labels(metric: Metric, figure: _Figure) -> tuple[str, ...]:
    labels = {**figure.where._asdict(), **figure.sample["labels"]}
    return tuple(labels.get(name, "") for name in (*_OF_PROCESS, *metric.labels))


def _gauge_family(metric: Metric, figures: Iterable[_Figure]) -> Any:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    values: dict[tuple[str, ...], float] = {}
    for each in figures:
        labels = _labels(metric, each)
        values[labels] = values.get(labels, 0.0) + each.sample["value"]
    family = GaugeMetricFamily(metric.name, metric.meaning, labels=[*_OF_PROCESS, *metric.labels])
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(
    name: str,
    meaning: str,
    labels: Sequence[str],
    bounds: Sequence[float],
    found: Iterable[tuple[tuple[str, ...], Sequence[int], float]],
) -> Any:
    """A histogram of label values, counts by bucket and sum; of equal labels they are added.

    What another version has counted in other buckets is left out.
    """
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    family = HistogramMetricFamily(name, meaning, labels=list(labels))
    counts: dict[tuple[str, ...], list[int]] = {}
    sums: dict[tuple[str, ...], float] = {}
    for key, counted, total in found:
        if len(counted) == len(bounds) + 1:
            counts[key] = [a + b for a, b in zip(counts.get(key, [0] * len(counted)), counted, strict=True)]
            sums[key] = sums.get(key, 0.0) + total
    ends = [floatToGoString(each) for each in (*bounds, float("inf"))]  # type: ignore[no-untyped-call]
    for key, counted in counts.items():
        family.add_metric(key, list(zip(ends, itertools.accumulate(counted), strict=True)), sums[key])
    return family


def _families(records: Iterable[_Record], declared: Mapping[str, Patch]) -> list[Any]:
    """Each sample once: of processes with the same labels counts are added, and of other values the greatest counts.

    A process has every patch's state, and the counters of those that are for processes of its kind.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    states: dict[tuple[str, ...], float] = {}
    counts: dict[tuple[str, ...], float] = {}
    greatest: dict[tuple[str, ...], float] = {}
    for patch, role, where, state, counters in records:
        for each in State:
            key = (patch, *where, each.value)
            states[key] = max(states.get(key, 0.0), float(each.value == state))
        if patch in declared and Process(role) not in declared[patch].processes:
            continue
        maxima = {each.name for each in declared[patch].counters if each.is_maximum} if patch in declared else set()
        for event, count in counters.items():
            key = (patch, *where, event)
            if event in maxima:
                greatest[key] = max(greatest.get(key, 0.0), float(count))
            else:
                counts[key] = counts.get(key, 0.0) + float(count)
    families: list[tuple[Any, dict[tuple[str, ...], float]]] = [
        (GaugeMetricFamily("omni_fastpath_patch_state", "1 for the patch's state", labels=[*_LABELS, "state"]), states),
        (CounterMetricFamily("omni_fastpath_events", "Engagement counters", labels=[*_LABELS, "event"]), counts),
        (GaugeMetricFamily("omni_fastpath_greatest", "Greatest values seen", labels=[*_LABELS, "value"]), greatest),
    ]
    for family, samples in families:
        for labels, value in samples.items():
            family.add_metric(labels, value)
    return [family for family, _ in families]
