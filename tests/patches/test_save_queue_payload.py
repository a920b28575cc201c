"""The size of a payload, and which of its tensors are copied while it is queued."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert (found["tuple"][1], found["text"], found["list"][1]) == (1, "t", None)
    assert found["nested"]["y"].tolist() == [0, 1, 2]


def test_tensor_without_a_storage_passes(torch: Any) -> None:
    """A sparse tensor is kept as it is, and the scheduler does not fail."""
    sparse = torch.eye(3).to_sparse()
    assert through({"x": sparse})[0]["x"] is sparse
