"""What is queued is the queue's own: nothing that the runner writes into meanwhile is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.soak_stage import Request, Stage, patched, unique, until

pytestmark = pytest.mark.upstream

POISON = -7


@pytest.fixture
def torch() -> Any:
    """Imported late, as everywhere."""
    import torch as module

    return module


def own(payload: Any, *, copy_all: bool = False) -> Any:
    """As the queue does it; ``storage`` is what it weighs then."""
    from omni_fastpath.patches.save_queue_cap.payload import give, keep, weigh

    kept, copied = keep(payload, keep_all=copy_all)
    return SimpleNamespace(value=give(kept), copied=copied, storage=weigh(kept)[0])


def test_view_of_a_larger_buffer_is_copied(torch: Any) -> None:
    """A part of a larger storage is the queue's own afterwards; poison in the buffer does not reach it."""
    buffer = torch.arange(100)
    owned = own({"x": buffer[10:20]})
    buffer.fill_(POISON)
    assert owned.value["x"].tolist() == list(range(10, 20))
    assert (owned.copied, list(owned.storage.values())) == (1, [80])
    assert owned.value["x"].untyped_storage().nbytes() == 80


def test_expanded_and_transposed_views_are_copied_with_their_content(torch: Any) -> None:
    """Views of another shape than their storage come out with the content they had."""
    row, table = torch.arange(3), torch.arange(12).reshape(3, 4)
    owned = own([row.expand(5, 3), table.T[1:]])
    expected = [row.expand(5, 3).tolist(), table.T[1:].tolist()]
    row.fill_(POISON)
    table.fill_(POISON)
    assert [each.tolist() for each in owned.value] == expected


def test_whole_storage_of_its_own_is_kept(torch: Any) -> None:
    """A tensor that is all of its storage is not copied, and counted by its address."""
    tensor = torch.arange(10)
    owned = own({"x": tensor})
    assert owned.value["x"] is tensor
    assert owned.copied == 0
    assert owned.storage == {tensor.untyped_storage().data_ptr(): 80}


def test_whole_buffer_of_a_cpu_device_is_copied(torch: Any) -> None:
    """Where the device's memory is main memory, moving an output there moves nothing: all is copied."""
    buffer = torch.arange(10)
    alias = buffer.detach().to("cpu").contiguous()  # upstream's move
    assert alias.data_ptr() == buffer.data_ptr()
    owned = own({"x": alias}, copy_all=True)
    buffer.fill_(POISON)
    assert owned.value["x"].tolist() == list(range(10))


def test_pinned_memory_is_copied(torch: Any) -> None:
    """Pinned memory is where a device copies to again: it is copied."""
    if not torch.cuda.is_available():
        pytest.skip("pinned memory needs an accelerator")
    buffer = torch.arange(10).pin_memory()
    owned = own({"x": buffer})
    buffer.fill_(POISON)
    assert owned.value["x"].tolist() == list(range(10))
    assert owned.copied == 1


def test_asking_whether_memory_is_pinned_starts_no_device(torch: Any) -> None:
    """A process that has no context on a device does not get one by queueing a tensor."""
    if not torch.cuda.is_available():
        pytest.skip("needs an accelerator")
    import subprocess
    import sys

    code = (
        "import torch\n"
        "from omni_fastpath.patches.save_queue_cap.payload import keep\n"
        "free = lambda: __import__('pynvml').nvmlDeviceGetMemoryInfo(handle).used\n"
        "import pynvml; pynvml.nvmlInit(); handle = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "before = free(); keep({'x': torch.arange(10)}, keep_all=False); after = free()\n"
        "assert not torch.cuda.is_initialized(); assert after - before < 2**24, (before, after)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_containers_of_the_clients_output_are_not_touched(torch: Any) -> None:
    """The client's output may be the same dict: neither it nor what is nested in it changes."""
    buffer = torch.arange(10)
    view, inner = buffer[:5], {"y": buffer[5:]}
    shared = {"x": view, "nested": inner, "list": [view, None], "tuple": (view, 1), "text": "t"}
    before = {**shared, "nested": dict(inner), "list": list(shared["list"])}
    owned = own(shared)
    assert shared.keys() == before.keys()
    assert shared["x"] is view
    assert shared["nested"] is inner
    assert inner["y"].data_ptr() == before["nested"]["y"].data_ptr()
    assert shared["list"][0] is view
    assert owned.value is not shared
    assert (owned.value["tuple"][1], owned.value["text"], owned.value["list"][1]) == (1, "t", None)


def test_unique_storage_counts_once(torch: Any) -> None:
    """The same tensor twice in a payload, or another shape of all of it, is its storage once."""
    tensor = torch.zeros(6, 4, dtype=torch.uint8)
    owned = own({"x": tensor, "y": [tensor, tensor.reshape(24)], "z": tensor.T})
    assert owned.storage == {tensor.untyped_storage().data_ptr(): 24}


@pytest.mark.parametrize("payload", [None, {}, {"x": None}, "text", 3, {"empty": []}])
def test_payload_without_tensors_stays_as_it_is(payload: Any) -> None:
    """Plain values pass and weigh nothing."""
    owned = own(payload)
    assert owned.value == payload
    assert (owned.storage, owned.copied) == ({}, 0)


def test_tensor_without_a_storage_passes(torch: Any) -> None:
    """A kind of tensor that cannot be looked at passes as upstream has it; the scheduler does not fail."""
    sparse = torch.eye(3).to_sparse()
    assert own({"x": sparse}).value["x"] is sparse


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_sent_is_what_was_queued(torch: Any, device: str) -> None:
    """The runner's buffer is overwritten by the next step while the chunk waits; the receiver gets the old content.

    On an accelerator the runner's buffer is a batch of which each request has a part; on a CPU it may be all of it.
    """
    with patched() as counters:
        request, blocker = Request(unique("s")), Request(unique("blocker"))
        buffer = torch.zeros(4, dtype=torch.int64)
        with Stage(device=device, lanes=1) as stage:
            stage.gate.shut(blocker.external_req_id)
            stage.save(blocker, 0)
            until(lambda: stage.gate.inside)
            for value in range(6):
                buffer.fill_(value)
                stage.save(request, value, tensor=buffer if device == "cpu" else buffer[1:3])
                stage.queue.own_what_waits()  # as before each step
            buffer.fill_(POISON)
            stage.gate.open()
            stage.drain()
            assert stage.fetch(request.external_req_id) == list(range(6))
        assert counters["copied_tensors"] >= 6


def test_upstreams_queue_would_send_the_poison(torch: Any) -> None:
    """The hazard is there: upstream's own queue sends what the buffer holds by then."""
    with patched():
        request, blocker = Request(unique("s")), Request(unique("blocker"))
        buffer = torch.zeros(4, dtype=torch.int64)
        with Stage(attach=False) as stage:
            stage.gate.shut(blocker.external_req_id)
            stage.save(blocker, 0)
            until(lambda: stage.gate.inside)
            stage.save(request, 0, tensor=buffer)
            buffer.fill_(POISON)
            stage.gate.open()
            until(lambda: stage.gate.order.count(request.external_req_id))
            until(lambda: not stage.gate.inside)
            assert stage.fetch(request.external_req_id) == [POISON]
