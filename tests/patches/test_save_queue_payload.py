"""The size of a payload, and when and which of its tensors are copied."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm_omni")

import torch

from omni_fastpath.patches.save_queue_cap import save_queue
from omni_fastpath.patches.save_queue_cap.fair_queue import FairQueue
from omni_fastpath.patches.save_queue_cap.payload import own, weigh

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize(
    "make", [lambda t: t.expand(5, 3), lambda t: t.reshape(3, 1).T, lambda t: t[:0], lambda t: t[1]]
)
def test_shape_and_content_stay(make: Any) -> None:
    """Copies of views, of an empty tensor and of one without dimensions keep their shape and content."""
    row = torch.arange(3)
    expected = make(row).clone()
    found = own({"x": make(row)}, all_tensors=True)["x"]
    row.fill_(-7)
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


def test_containers_of_the_clients_output_are_not_touched() -> None:
    """The client's output may be the same dict, so that neither it nor its nested containers change."""
    view, inner = torch.arange(10)[:3], {"y": torch.arange(10)[:3]}
    shared = {"x": view, "nested": inner, "list": [view, None], "tuple": (view, 1), "text": "t"}
    before = (dict(shared), inner["y"])
    found: Any = own(shared, all_tensors=False)
    assert weigh(shared) == 4 * 24
    assert all(shared[key] is value for key, value in before[0].items())
    assert inner["y"] is before[1]
    assert shared["list"][0] is view
    assert (found["tuple"][1], found["text"], found["list"][1]) == (1, "t", None)
    assert found["nested"]["y"].tolist() == [0, 1, 2]


# ---- When a payload is copied ----


class Queue:
    """A queue without a save thread, whose clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(save_queue, "time", SimpleNamespace(monotonic=lambda: self.now))
        thread = SimpleNamespace(ident=threading.get_ident())
        adapter = SimpleNamespace(save_thread=thread, connector=None, put_req_chunk={}, _sender_tokens=())
        self.queue = save_queue.SaveQueue(adapter, holds=None, unfetched=None, copies_all=False)

    def step(self, *streams: str, rows: int) -> None:
        """Queue a row of a batch for each of the streams, and begin the next step."""
        batch = torch.zeros(rows, 10)
        for row, stream in enumerate(streams):
            request = SimpleNamespace(external_req_id=stream, additional_information=None)
            self.queue.append({"request": request, save_queue.PAYLOAD: {"x": batch[row : row + 1]}})
        self.queue.before_step()

    def send(self, seconds: float = 0.0) -> tuple[str, bool]:
        """Send the next task. Its stream, and whether its payload was copied."""
        task = self.queue.popleft()
        self.now += seconds
        assert self.queue or not len(self.queue)
        return task["request"].external_req_id, task[save_queue.PAYLOAD]["x"].untyped_storage().nbytes() == 40


def test_payloads_of_a_slow_stream_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait when it becomes slow, and those that arrive while it is behind, and no others."""
    queue = Queue(monkeypatch)
    queue.step("slow", "a", "b", rows=3)
    queue.step("slow", "a", "b", rows=3)
    assert queue.send(0.2) == ("slow", False)
    queue.step("slow", "a", "b", rows=3)
    assert [queue.send() for _ in range(8)] == [("a", False), ("b", False)] * 3 + [("slow", True)] * 2


@pytest.mark.parametrize("rows", [6, 7])
def test_less_than_half_of_a_step_is_copied(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The others' rows, such as a prompt of a request for text alone, are not kept."""
    queue = Queue(monkeypatch)
    queue.step("a", "b", "c", rows=rows)
    assert [queue.send() for _ in range(3)] == [(name, rows > 6) for name in "abc"]


def test_a_task_that_was_being_sorted_in_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception of ours the queue is aside before the other thread can sort the task in again."""
    queue = Queue(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(FairQueue, "_offer", Mock(side_effect=KeyError("ours")))
        with pytest.raises(KeyError):
            queue.step("a", rows=1)
    queue.step("b", rows=1)  # as the other thread, before the guard steps aside
    queue.queue.step_aside()
    assert [queue.queue.popleft()["request"].external_req_id for _ in range(len(queue.queue))] == ["a", "b"]
