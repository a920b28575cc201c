"""The Grafana dashboard on real servers under load: every query finds data, as a real Prometheus has scraped it.

Without a ``prometheus`` (Debian's package of that name) no query is evaluated; each family that one asks for must stand
in ``/metrics`` all the same.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard import families_in, filled_in, queries

pytestmark = [pytest.mark.server, pytest.mark.more, pytest.mark.timeout(600)]

SCRAPES = 12
MAY_STAND_STILL = "omni_fastpath_gc_pause_seconds"
"""Perhaps no full collection falls into the load."""
MAY_BE_ZERO = "histogram_quantile("
"""A quantile is no number where nothing was observed; zero is one, as on a quick machine where nothing stands ahead."""
OF_STAGES = "omni_fastpath_save_queue"
"""What only real stage processes have, and light engines have not."""

STOCK = {"OMNI_FASTPATH_QUEUE_METRICS": "1"}
FASTPATH = {"OMNI_FASTPATH": "1", **STOCK}

TWO = ("--api-server-count", "2")

CASES = [
    pytest.param(FASTPATH, (), "1", id="fastpath, one API server"),
    pytest.param(FASTPATH, TWO, "light", id="fastpath, two API servers, light engines"),
    pytest.param(STOCK, (), "1", id="stock, one API server"),
    pytest.param(STOCK, TWO, "light", id="stock, two API servers, light engines"),
]


def get(url: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - an address of this machine
        found: str = answer.read().decode()
    return found


class Prometheus:
    """A real one that scrapes a server each second."""

    def __init__(self, address: str, port: int) -> None:
        self._url = f"http://{address}:{port}"

    def values(self, query: str) -> list[float]:
        """What a query finds now."""
        answer = json.loads(get(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
        assert answer["status"] == "success", answer
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            get(f"{self._url}/-/ready")
        except OSError:
            return False
        return True


@contextmanager
def scraping(server: Any, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus for one server, gone afterwards; skips where there is none."""
    from omni_fastpath.tools.ab.asked import free_port

    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus here (Debian's package of that name): no query is evaluated")
    target = urllib.parse.urlsplit(server.url).netloc
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            found = Prometheus("127.0.0.1", port)
            for _ in range(300):
                assert process.poll() is None, "prometheus did not start"
                if found.is_ready():
                    break
                time.sleep(0.1)
            yield found
        finally:
            process.terminate()


def load(server: Any, number: int) -> None:
    """One wave of requests with text and audio."""
    from omni_fastpath.tools.ab.capture import chat_request, run_closed_loop

    requests = [
        chat_request(f"Question {number} {n}", modalities=("text", "audio"), max_tokens=6 + n % 3) for n in range(8)
    ]
    captures = run_closed_loop(server.url, requests, 4)
    assert all(capture.succeeded for capture in captures), [capture.error for capture in captures]


def asked(device: str) -> Sequence[str]:
    """The queries that have an answer there."""
    return [query for query in queries() if device == "1" or OF_STAGES not in query]


def names_in(metrics: str) -> set[str]:
    """The families of ``/metrics`` that have a sample, counters with their suffix and histograms without."""
    samples = (line.partition("{")[0].partition(" ")[0] for line in metrics.splitlines() if not line.startswith("#"))
    return {name for sample in samples for name in families_in(sample)}


@pytest.mark.parametrize(("variables", "arguments", "device"), CASES)
def test_every_query_has_data(
    server: Callable[..., Any], tmp_path: Path, variables: dict[str, str], arguments: tuple[str, ...], device: str
) -> None:
    """Each family is exported under load, and each query of each panel finds a number; a plain rate is above zero."""
    environment = {"OMNI_SIMULATED_DEVICE": device, **variables}
    with server("qwen3_omni", "qwen3_omni.yaml", environment=environment, arguments=arguments) as running:
        load(running, 0)
        time.sleep(3)  # state files are refreshed every two seconds
        there = names_in(get(running.url + "/metrics"))
        missing = {name for query in asked(device) for name in families_in(query)} - there
        assert not missing
        with scraping(running, tmp_path) as prometheus:
            wave = 0
            while sum(prometheus.values("sum_over_time(up[10m])")) < SCRAPES:
                wave += 1
                load(running, wave)
            time.sleep(4)  # the state files, and a scrape more
            found = {query: prometheus.values(filled_in(query, "10m")) for query in asked(device)}
    numbers = {query: [value for value in values if not math.isnan(value)] for query, values in found.items()}
    assert [query for query, values in numbers.items() if not values] == []
    moving = [query for query in numbers if "rate(" in query and not query.startswith(MAY_BE_ZERO)]
    assert [query for query in moving if MAY_STAND_STILL not in query and not max(numbers[query])] == []
