"""``save_queue_cap``: the queue between a stage's scheduler and the thread that sends its chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import Measured, Stages

ROUNDS = 40


def _task(stream: str) -> dict[str, Any]:
    """A save task as upstream queues it, without a payload."""
    return {"multimodal_output": None, "request": SimpleNamespace(external_req_id=stream)}


def _take(queue: Any, tasks: int) -> float:
    """Take tasks as upstream's ``save_loop`` does; seconds per task."""
    began = time.thread_time()
    for _ in range(tasks):
        if queue:
            queue.popleft()
    return (time.thread_time() - began) / tasks


@contextmanager
def _on_save_thread(stage: Any) -> Iterator[Callable[[Callable[[], float]], float]]:
    """Runs functions on the save thread of a stage, which sends nothing meanwhile."""
    asked, answers = SimpleQueue[Any](), SimpleQueue[float]()

    def serve(_task: Any) -> None:
        for function in iter(asked.get, None):
            answers.put(function())

    def run(function: Callable[[], float]) -> float:
        asked.put(function)
        return answers.get(timeout=60)

    stage.adapter._send_single_request = serve
    stage.queue.append(_task("serve"))
    try:
        yield run
    finally:
        stage.adapter._send_single_request = lambda _task: None
        asked.put(None)


@pytest.mark.parametrize(("streams", "backlog"), [(1, 16), (64, 64), (64, 1024)])
def test_take(measured: Measured, stages: Stages, streams: int, backlog: int) -> None:
    """One task, on the save thread, from a backlog of that number of tasks and streams, without slow sends."""
    with stages() as stage, _on_save_thread(stage) as run:

        def once() -> float:
            for number in range(backlog):
                stage.queue.append(_task(f"s{number % streams}"))
            return run(lambda: _take(stage.queue, backlog))

        measured(once, ROUNDS)


@pytest.mark.parametrize("steps_behind", [0, 1, 16])
@pytest.mark.parametrize("streams", [16, 64, 128])
def test_schedule(measured: Measured, stages: Stages, streams: int, steps_behind: int) -> None:
    """One ``schedule``, which sorts in the tasks of the last step, behind the tasks of that number of steps."""
    with stages(streams) as stage, _on_save_thread(stage) as run:

        def once(take: bool = True) -> float:
            began = time.thread_time()
            scheduled = stage.scheduler.schedule()
            found = time.thread_time() - began
            stage.scheduler.update_from_output(scheduled, stage.answer(scheduled))
            if take:
                run(lambda: _take(stage.queue, streams))
            return found

        for _ in range(steps_behind):
            once(take=False)
        measured(once, ROUNDS)
