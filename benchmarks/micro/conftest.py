"""The arm of this process, and the fixtures of the benchmarks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.rigs.arm import STOCK, Arm, check, switch_on
from omni_fastpath.declare import Process

ARMS = {
    "stock": STOCK,
    "fastpath": Arm("fastpath", {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_SAVE_QUEUE_CAP": "1"}),
}

Measured = Callable[[Callable[[], float], int], None]
Stages = Callable[..., AbstractContextManager[Any]]


class _Clock:
    """A clock that advances by the time that each round reports."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def read(self) -> float:
        return self.now_s


_CLOCK = _Clock()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--arm``."""
    parser.addoption(
        "--arm", choices=list(ARMS), default="fastpath", help="stock, or the patches switched on in this process"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the arm a parameter of each benchmark, so that saved runs record it."""
    metafunc.parametrize("arm", [metafunc.config.getoption("--arm")], scope="session")


def pytest_itemcollected(item: Any) -> None:
    """Group benchmarks that differ only by arm, and use our clock for those with ``measured``."""
    sizes = [each for each in item.callspec.id.split("-") if each not in ARMS]
    group = ": ".join([item.originalname.removeprefix("test_").replace("_", " "), *filter(None, [", ".join(sizes)])])
    named = {"timer": _CLOCK.read} if "measured" in item.fixturenames else {}
    item.add_marker(pytest.mark.benchmark(group=group, disable_gc=True, **named))


@pytest.fixture(scope="session", autouse=True)
def _switched_on(arm: str) -> Iterator[None]:
    """Install the arm, the patches of a server's and of a stage's process, and check it at the start and at the end."""
    importlib.import_module("vllm_omni.entrypoints.openai.serving_chat")  # as in `vllm serve`
    for process in (Process.SERVER, Process.STAGE):
        switch_on(ARMS[arm], process)
    yield
    for process in (Process.SERVER, Process.STAGE):
        check(ARMS[arm], process)


@pytest.fixture
def measured(benchmark: BenchmarkFixture) -> Measured:
    """``measured(once, rounds)``: ``once()`` runs one round and returns its figure in seconds."""

    def run(once: Callable[[], float], rounds: int) -> None:
        def timed() -> None:
            _CLOCK.now_s += once()

        benchmark.pedantic(timed, rounds=rounds, warmup_rounds=1)

    return run


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """``stages(streams)``: a stage with that number of requests in progress, whose chunks are not sent."""
    from tests.patches.small_stage import SmallStage, stage_config

    config = stage_config(tmp_path_factory.mktemp("model"))

    @contextmanager
    def make(streams: int = 0) -> Iterator[Any]:
        config.scheduler_config.max_num_seqs = config.model_config.max_num_seqs = max(streams, 1)
        with SmallStage(config, codes=16) as stage:
            stage.adapter._send_single_request = lambda _task: None
            stage.add_all({f"r{number}": 4000 for number in range(streams)})
            yield stage

    return make
