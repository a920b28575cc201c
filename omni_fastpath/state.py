"""What others see of this process: its state file, for ``omni-fastpath status``, and ``/metrics``.

Both are made from one dictionary (``Publisher.said``), which is written when a state changes and every two seconds.
``/metrics`` of an API process is made from its own dictionary and from the files of the server's other processes. The
thread that writes the file collects it too, so a scrape reads no file.

A file ``PID-NAMESPACE.json`` is in a folder that only this user can write. Containers may share the folder, so files of
other process namespaces are neither shown nor deleted. An error is logged once, and the server continues.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import stat
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_fastpath import __version__, process_role, threads
from omni_fastpath.declare import Metric, Patch, Process, State
from omni_fastpath.ledger import LEDGER, warn_once
from omni_fastpath.releases import vllm_omni_release, vllm_release
from omni_fastpath.seams import MARK, is_ours

SCHEMA = 4
"""The version of a file. Files of other versions are not read."""

REFRESH_S = 2.0

API_WORKER = re.compile(r"ApiServer_\d+$")
"""vLLM's names of the processes of ``--api-server-count``. Their parent starts the stages and serves no request."""

_FILE = re.compile(r"([0-9]{1,9})-([0-9]+)\.(json|tmp)")
_STAGE_PROCESS = re.compile(r"_stage(\d+)_replica(\d+)")
_HERE = Path("/proc/self/cwd")

Said = dict[str, Any]
"""What a process says of itself (``Publisher.said``), as plain data."""


# ---- Where the files are ----


def folders(environ: Mapping[str, str], working: Path) -> list[Path]:
    """The folders in which a process of this user may have its file. It uses the first that it can.

    Args:
        environ: The variables of that process.
        working: Its working folder, in which it may have a relative ``TMPDIR``, or no other folder that it can write.
    """
    user = os.geteuid()
    runtime = (Path(environ.get("XDG_RUNTIME_DIR", "").strip()), Path(f"/run/user/{user}"))
    found = [each / "omni-fastpath" for each in runtime if each.is_absolute() and _is_private(each)]
    temporary = [environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    places = (*filter(None, temporary), "/tmp", "/var/tmp", "/usr/tmp", "")  # noqa: S108 - as in tempfile
    return [*found, *(working / each / f"omni-fastpath-{user}" for each in places)]


def folder() -> Path:
    """The folder of this process's file. It is made if it does not exist.

    Raises:
        PermissionError: There is no folder that this user, and nobody else, can write.
    """
    for place in folders(os.environ, _HERE):
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, exist_ok=True)
        if _is_private(place) and os.access(place, os.W_OK):
            return place
    raise PermissionError(f"there is no folder that only user {os.geteuid()} can write; set XDG_RUNTIME_DIR")


def _is_private(base: Path) -> bool:
    """Whether a folder exists, is not a link, belongs to this user, and no other user can write into it."""
    try:
        found = base.lstat()
    except OSError:
        return False
    others_may_write = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not others_may_write


# ---- One file ----


def write(said: Said) -> Path:
    """Replace this process's file.

    Raises:
        OSError: It cannot be written, or there is no folder for it.
    """
    file = folder() / f"{os.getpid()}-{process_role.namespace()}.json"
    temporary = file.with_suffix(".tmp")
    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(created, "w", encoding="utf-8") as opened:
        json.dump({**said, "check": _check(said)}, opened, default=str)
    temporary.replace(file)
    return file


def read_live(places: Iterable[Path] | None = None) -> list[Said]:
    """The files of the running processes of this namespace, by process id. Files of dead processes are deleted.

    Links, files of other users and files of another version are skipped, as are folders that others can write.

    Args:
        places: The folders. None means those of this process.
    """
    live: dict[int, Said] = {}
    for place in dict.fromkeys(folders(os.environ, _HERE) if places is None else places):
        for file in place.iterdir() if _is_private(place) else ():
            match = _FILE.fullmatch(file.name)
            if match is None or int(match[2]) != process_role.namespace():
                continue
            pid, said = int(match[1]), _parsed(file)
            began = process_role.started(pid)
            if began is None or (said is not None and said["started"] != began):
                with contextlib.suppress(OSError):  # if it cannot be deleted, it is at least not shown
                    file.unlink()
            elif said is not None and said["pid"] == pid:
                live[pid] = said
    return [live[pid] for pid in sorted(live)]


def _parsed(file: Path) -> Said | None:
    try:
        found = file.lstat()
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and file.suffix == ".json"
        said = json.loads(file.read_bytes()) if is_ours else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("schema") != SCHEMA or said.pop("check", None) != _check(said):
        return None  # of another version, or damaged
    return said


def _check(said: Said) -> int:
    """A checksum of what a file says."""
    return zlib.crc32(json.dumps(said, default=str).encode())


def stage_and_replica() -> tuple[int | None, int | None]:
    """The stage and the replica for which this process was spawned. None if they are unknown.

    The name of an engine process contains them (``StageEngineCoreProcManager``). A diffusion process gets them as
    arguments (``StageDiffusionProcManager``), which the process object keeps. Workers know neither.
    """
    process = multiprocessing.current_process()
    match = _STAGE_PROCESS.search(process.name)
    if match:
        return int(match[1]), int(match[2])
    arguments = getattr(process, "_kwargs", {})
    stage, replica = arguments.get("omni_stage_id"), arguments.get("omni_replica_id")
    return (stage, replica) if isinstance(stage, int) and isinstance(replica, int) else (None, None)


# ---- This process ----


class Publisher:
    """Writes this process's file and, in a server, is the collector of ``/metrics`` for prometheus_client.

    If a patch is applied, and in a server in which a patch is enabled, a thread does both every ``REFRESH_S`` seconds.
    So a file that a cleaner of temporary files or a user's logout has deleted is written again. In other processes
    nothing changes and no thread runs.

    Args:
        process: The kind of this process.
        source: The source of the configuration.
        before_refresh: Called before each refresh. It may change the states of patches.
    """

    def __init__(self, process: Process, source: str | None, before_refresh: Callable[[], None] = lambda: None) -> None:
        self._before_refresh = before_refresh
        serves = process is Process.SERVER and process_role.is_serve(sys.argv)
        stage, replica = stage_and_replica()
        vllm, vllm_omni = vllm_release(), vllm_omni_release()
        self._fixed: Said = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "started": process_role.started(os.getpid()),
            "above": process_role.ancestors(os.getpid()),  # now, because one of them may end earlier
            "role": process.value,
            "process_name": multiprocessing.current_process().name,
            "stage": stage,
            "replica": replica,
            "port": process_role.port(sys.argv[1:]) if serves else None,
            "omni_fastpath": __version__,
            "vllm": str(vllm) if vllm is not None else None,
            "vllm_omni": vllm_omni.version if vllm_omni is not None else None,
            "source": source,
        }
        self._is_server = process is Process.SERVER
        self._said: Said = {}
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._refreshing: threading.Thread | None = None
        self._ended = threading.Event()
        self._collected: list[Any] = []

    def start(self) -> None:
        """Write the file now, keep it up to date, remove it at exit, and show the metrics of a server."""
        LEDGER.listen(lambda *_: self.write())
        atexit.register(self._remove)
        self.write()
        if self._is_server and not process_role.master_off(os.environ):
            self.refresh()
            export(self)

    def update(self, source: str | None) -> None:
        """Set the source of a configuration that was read later."""
        self._fixed["source"] = source
        self.write()

    def said(self) -> Said:
        """The dictionary.

        ``started`` is in clock ticks since boot, ``updated`` in seconds since 1970. ``above`` has the ids of the
        process's ancestors, ``cpu_s`` the processor time of a server's threads. ``patches`` is that of the ledger.
        """
        used = threads.used() if self._is_server else {}
        return {**self._fixed, "updated": time.time(), "cpu_s": used, "patches": LEDGER.snapshot()}

    def write(self) -> None:
        """Write the file. If two threads write at the same time, the next refresh corrects the order."""
        if os.getpid() != self._fixed["pid"]:
            return  # a forked child must not write its parent's file, and may have inherited a locked lock
        try:
            # Without the lock, because a patch whose figures fail reports a state, which calls this method again.
            self._said = self.said()
            with self._lock:
                if self._ended.is_set():
                    return  # the exit handler has removed the file while the thread was about to write it
                before, self._path = self._path, write(self._said)
                if before is not None and before != self._path:  # /run/user/UID exists only during a user's sessions
                    before.unlink(missing_ok=True)
        except Exception as error:
            warn_once(f"the state file cannot be written, so status does not show this process: {error}")
        with self._lock:
            if self._refreshing is None and any(self._can_change(entry.state) for entry in LEDGER):
                self._refreshing = threading.Thread(target=self._keep_fresh, name="omni-fastpath-state", daemon=True)
                self._refreshing.start()

    def _can_change(self, state: State) -> bool:
        return state is State.APPLIED or (self._is_server and state is not State.OFF)

    def _keep_fresh(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self._before_refresh()
            self.write()
            if self._is_server:
                self.refresh()

    def refresh(self) -> None:
        """Collect the metrics of this server's processes."""
        try:
            found = [self._said, *self._elsewhere(read_live())]
            declared = {entry.patch.name: entry.patch for entry in LEDGER}
            self._collected = [family for family in _families(found, declared) if family.samples]
        except Exception as error:
            warn_once(f"/metrics lacks the patches: {error}")
            self._collected = []

    def _elsewhere(self, live: Sequence[Said]) -> Iterator[Said]:
        """What this server's other processes say. A stage's worker has the stage of the engine process above it."""
        own, by_pid = self._fixed, {each["pid"]: each for each in live}
        # The root of several API processes is their parent.
        root = own["above"][0] if own["above"] and API_WORKER.match(own["process_name"]) else own["pid"]
        for each in live:
            if each["pid"] != own["pid"] and root in (each["pid"], *each["above"]):
                line = [each, *(by_pid[pid] for pid in each["above"] if pid in by_pid)]
                of = next((one for one in line if one["stage"] is not None), each)
                yield {**each, "stage": of["stage"], "replica": of["replica"]}

    def _remove(self) -> None:
        if os.getpid() != self._fixed["pid"]:
            return  # a forked child inherits the handler
        with self._lock, contextlib.suppress(OSError):
            self._ended.set()
            if self._path is not None:
                self._path.unlink()

    def collect(self) -> list[Any]:
        """The metric families of the last refresh."""
        return self._collected

    def describe(self) -> list[Any]:
        """An empty list, so that the registry does not compare names when this is registered."""
        return []


# ---- /metrics ----

_OF_PROCESS = ("process", "stage", "replica")
_LABELS = ("patch", *_OF_PROCESS)
_Labels = tuple[str, ...]


def export(publisher: Publisher) -> None:
    """Show a server's metrics in every place where this process shows upstream's.

    These are in ``REGISTRY``. If prometheus_client was imported in its multiprocess mode, as in each of several API
    processes, they are also in its files, and upstream's ``/metrics`` is a registry that contains only a
    ``MultiProcessCollector``. So the metrics are added to that collector's.
    """
    from prometheus_client import REGISTRY, values  # noqa: PLC0415 - only when something is on

    REGISTRY.register(publisher)
    if values.ValueClass is values.MutexValue:  # the variable itself may have been set later, without effect
        return
    from prometheus_client.multiprocess import MultiProcessCollector  # noqa: PLC0415
    from wrapt import FunctionWrapper  # noqa: PLC0415

    raw = vars(MultiProcessCollector)["collect"]
    if is_ours(raw):
        return

    def wrapped_collect(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Iterable[Any]:
        return itertools.chain(wrapped(*args, **kwargs), publisher.collect())

    ours = FunctionWrapper(raw, wrapped_collect)
    setattr(ours, MARK, "metrics")
    MultiProcessCollector.collect = ours  # type: ignore[method-assign]


def _where(said: Said) -> _Labels:
    """The values of ``_OF_PROCESS``: upstream's name of the process, or its role. Stage and replica may be empty."""
    process = said["role"] if said["process_name"] == "MainProcess" else said["process_name"]
    return process, *("" if said[each] is None else str(said[each]) for each in ("stage", "replica"))


def _families(processes: Sequence[Said], declared: Mapping[str, Patch]) -> Iterator[Any]:
    """The states, counters, maxima and metrics of patches, and the processor time of threads.

    Values with the same labels are added, and of maxima the greatest is taken. Every process shows the state of every
    patch, but only the counters of patches for its kind of process.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

    states, events, greatest, used = (defaultdict[_Labels, float](float) for _ in range(4))
    for said in processes:
        where = _where(said)
        for name, seconds in said["cpu_s"].items():
            used[(*where, name)] += seconds
        for name, record in said["patches"].items():
            states[(name, *where, record["state"], record["same_as"])] = 1
            patch = declared.get(name)
            for counter in patch.counters if patch and Process(said["role"]) in patch.processes else ():
                labels, value = (name, *where, counter.name), record["counters"].get(counter.name, 0)
                if counter.is_maximum:
                    greatest[labels] = max(greatest[labels], value)
                else:
                    events[labels] += value
    for kind, name, meaning, labels, found in (
        (GaugeMetricFamily, "patch_state", "1 for the patch's state", (*_LABELS, "state", "same_as"), states),
        (CounterMetricFamily, "events", "Engagement counters", (*_LABELS, "event"), events),
        (GaugeMetricFamily, "greatest", "Greatest values seen", (*_LABELS, "value"), greatest),
        (CounterMetricFamily, "thread_cpu_seconds", "Processor time of threads", (*_OF_PROCESS, "thread"), used),
    ):
        family = kind(f"omni_fastpath_{name}", meaning, labels=labels)
        for values, value in found.items():
            family.add_metric(values, value)
        yield family
    for name, patch in declared.items():
        for metric in patch.metrics:
            yield _metric_family(metric, [(_where(said), said["patches"].get(name, {})) for said in processes])


def _metric_family(metric: Metric, records: Iterable[tuple[_Labels, Mapping[str, Any]]]) -> Any:
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily  # noqa: PLC0415
    from prometheus_client.utils import floatToGoString  # noqa: PLC0415

    names = (*_OF_PROCESS, *metric.labels)
    found = defaultdict[_Labels, list[Mapping[str, Any]]](list)
    for where, record in records:
        for sample in record.get("figures", {}).get(metric.name, ()):
            labels = {**dict(zip(_OF_PROCESS, where, strict=True)), **sample["labels"]}
            found[tuple(labels.get(name, "") for name in names)].append(sample)
    if metric.bounds is None:
        gauge = GaugeMetricFamily(metric.name, metric.meaning, labels=names)
        for values, samples in found.items():
            gauge.add_metric(values, sum(each["value"] for each in samples))
        return gauge
    histogram = HistogramMetricFamily(metric.name, metric.meaning, labels=names)
    ends = [floatToGoString(each) for each in (*metric.bounds, float("inf"))]  # type: ignore[no-untyped-call]
    for values, samples in found.items():
        counts = itertools.accumulate(map(sum, zip(*(each["counts"] for each in samples), strict=True)))
        histogram.add_metric(values, list(zip(ends, counts, strict=True)), sum(each["sum"] for each in samples))
    return histogram
