"""The size of a payload, and when and which of its tensors are copied. When the save thread checks what was fetched."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.save_queue_cap import PATCH

pytestmark = pytest.mark.upstream

POISON = -7


@pytest.fixture
def torch() -> Any:
    """Imported when a test runs."""
    import torch as module

    return module


def through(payload: Any, *, all_tensors: bool = False) -> tuple[Any, int]:
    """What the queue keeps of a queued payload, and its bytes."""
    from omni_fastpath.patches.save_queue_cap.payload import own, weigh

    return own(payload, all_tensors=all_tensors), weigh(payload)


def test_part_of_a_batch_is_copied(torch: Any) -> None:
    """A part of a larger tensor is copied, so that it does not keep that alive and later writes do not change it."""
    batch = torch.arange(100)
    found, nbytes = through({"x": batch[10:20]})
    batch.fill_(POISON)
    assert (found["x"].tolist(), nbytes) == (list(range(10, 20)), 80)
    assert found["x"].untyped_storage().nbytes() == 80


def test_memory_of_its_own_is_copied_on_a_cpu_device_alone(torch: Any) -> None:
    """Where the device's memory is main memory, upstream's move copies nothing, so every tensor is copied."""
    buffer = torch.arange(10)
    alias = buffer.detach().to("cpu").contiguous()  # upstream's move
    assert alias.data_ptr() == buffer.data_ptr()
    assert through({"x": alias})[0]["x"] is alias
    found, nbytes = through({"x": alias}, all_tensors=True)
    buffer.fill_(POISON)
    assert (found["x"].tolist(), nbytes) == (list(range(10)), 80)


@pytest.mark.parametrize(
    "make", [lambda t: t.expand(5, 3), lambda t: t.reshape(3, 1).T, lambda t: t[:0], lambda t: t[1]]
)
def test_shape_and_content_stay(torch: Any, make: Any) -> None:
    """Copies of views, of an empty tensor and of one without dimensions keep their shape and content."""
    row = torch.arange(3)
    expected = make(row).clone()
    found = through({"x": make(row)}, all_tensors=True)[0]["x"]
    row.fill_(POISON)
    assert found.shape == expected.shape
    assert found.tolist() == expected.tolist()


def test_containers_of_the_clients_output_are_not_touched(torch: Any) -> None:
    """The client's output may be the same dict, so that neither it nor its nested containers change."""
    view, inner = torch.arange(10)[:3], {"y": torch.arange(10)[:3]}
    shared = {"x": view, "nested": inner, "list": [view, None], "tuple": (view, 1), "text": "t"}
    before = (dict(shared), inner["y"])
    found, nbytes = through(shared)
    assert nbytes == 4 * 24
    assert all(shared[key] is value for key, value in before[0].items())
    assert inner["y"] is before[1]
    assert shared["list"][0] is view
    assert (found["tuple"][1], found["text"], found["list"][1], found["nested"]["y"].tolist()) == (
        1,
        "t",
        None,
        [0, 1, 2],
    )


def test_tensor_without_a_storage_passes(torch: Any) -> None:
    """A sparse tensor is kept as it is, and the scheduler does not fail."""
    sparse = torch.eye(3).to_sparse()
    assert through({"x": sparse})[0]["x"] is sparse


# ---- When a payload is copied ----


class Queue:
    """A queue without a save thread. Each step queues a row of one batch for each of the streams, of three or more.

    Args:
        copies_all: Of ``SaveQueue``.
    """

    def __init__(
        self, torch: Any, monkeypatch: pytest.MonkeyPatch, *, copies_all: bool = False, unfetched: Any = None
    ) -> None:
        LEDGER.entry(PATCH)
        from omni_fastpath.patches.save_queue_cap import save_queue

        self.now, self._torch, self._key = 0.0, torch, save_queue.PAYLOAD
        monkeypatch.setattr(save_queue, "time", SimpleNamespace(monotonic=lambda: self.now))
        adapter = SimpleNamespace(
            save_thread=SimpleNamespace(ident=threading.get_ident()),
            put_req_chunk={},
            connector=SimpleNamespace(stage_id=0, _metrics={"puts": 0, "bytes_transferred": 0}),
            _sender_tokens={"slow": 1},
        )
        self.queue = save_queue.SaveQueue(adapter, unfetched=unfetched, few_bytes=100, copies_all=copies_all)

    def step(self, *streams: str) -> None:
        """Queue the rows of one batch, and begin the next step."""
        batch = self._torch.zeros(len(streams), 10)
        for row, stream in enumerate(streams):
            request = SimpleNamespace(external_req_id=stream, additional_information=None)
            self.queue.append({"request": request, self._key: {"x": batch[row : row + 1]}})
        self.queue.before_step()

    def send(self, seconds: float = 0.0) -> tuple[str, bool]:
        """Send the next task. Its stream, and whether its payload was copied."""
        task = self.queue.popleft()
        tensor = task[self._key]["x"]
        self.now += seconds
        assert self.queue or not len(self.queue)
        return task["request"].external_req_id, bool(tensor.untyped_storage().nbytes() == tensor.nbytes)


def test_payloads_that_are_sent_in_order_of_arrival_are_not_copied(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their batch is kept no longer than they are."""
    queue = Queue(torch, monkeypatch)
    for _ in range(3):
        queue.step("a", "b", "c")
    assert [queue.send() for _ in range(9)] == [("a", False), ("b", False), ("c", False)] * 3


def test_payloads_of_a_slow_stream_are_copied(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait when it becomes slow, and those that arrive while it is behind, so that they keep no batch."""
    queue = Queue(torch, monkeypatch)
    queue.step("slow", "a", "b")
    queue.step("slow", "a", "b")
    assert queue.send(0.2) == ("slow", False)
    queue.step("slow", "a", "b")
    assert [queue.send() for _ in range(8)] == [("a", False), ("b", False)] * 3 + [("slow", True)] * 2


def test_on_a_cpu_device_each_payload_that_waits_is_copied(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next step, which writes into the same memory."""
    queue = Queue(torch, monkeypatch, copies_all=True)
    queue.step("a", "b")
    assert [queue.send(), queue.send()] == [("a", True), ("b", True)]


@pytest.mark.parametrize(("nbytes", "checks"), [(100, 1), (101, 3)])
def test_few_unfetched_bytes_are_checked_when_no_task_waits(
    torch: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int, checks: int
) -> None:
    """A check costs system calls, which the save thread makes between two sends only for more than a few bytes."""
    found: list[float] = []
    unfetched = SimpleNamespace(nbytes=nbytes, check=found.append, sent=lambda _stream, _now: None)
    queue = Queue(torch, monkeypatch, unfetched=unfetched)
    queue.step("a", "b", "c")
    for _ in range(3):
        queue.send(1.0)
    assert len(found) == checks
