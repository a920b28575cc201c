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


def own(payload: Any) -> Any:
    """As the queue does it; ``storage`` is what it weighs then."""
    from omni_fastpath.patches.save_queue_cap.payload import give, keep, weigh

    kept, copied = keep(payload)
    return SimpleNamespace(value=give(kept), copied=copied, storage={at: n for at, (n, _) in weigh(kept).items()})


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
    owned = own({"row": row.expand(5, 3), "table": table.T[1:]})
    expected = [row.expand(5, 3).tolist(), table.T[1:].tolist()]
    row.fill_(POISON)
    table.fill_(POISON)
    assert [each.tolist() for each in owned.value.values()] == expected


def test_only_what_is_asked_for_is_copied(torch: Any) -> None:
    """Of a payload with parts of two storages one may be copied and the other stay as it is."""
    from omni_fastpath.patches.save_queue_cap.payload import give, keep

    batch, other = torch.arange(10), torch.arange(10)
    payload = {"x": batch[:2], "y": other[:2]}
    kept, copied = keep(payload, lambda address: address == batch.untyped_storage().data_ptr())
    batch.fill_(POISON)
    assert copied == 1
    assert kept["y"] is payload["y"]
    assert give(kept)["x"].tolist() == [0, 1]
    assert keep(payload, lambda _address: False) == (payload, 0)


def test_whole_buffer_of_a_cpu_device_is_copied(torch: Any) -> None:
    """Where the device's memory is main memory, moving an output there moves nothing: all is copied."""
    buffer = torch.arange(10)
    alias = buffer.detach().to("cpu").contiguous()  # upstream's move
    assert alias.data_ptr() == buffer.data_ptr()
    owned = own({"x": alias})
    buffer.fill_(POISON)
    assert owned.value["x"].tolist() == list(range(10))


def test_content_that_bytes_cannot_give_back_is_copied_as_a_tensor(torch: Any) -> None:
    """Kinds of numbers that a buffer does not give back, and lazy conjugates and negatives, come out equal."""
    conjugate = torch.randn(8, dtype=torch.complex64)[:4].conj()
    halves = torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn)[:2]
    owned = own({"c": conjugate, "n": conjugate.imag, "h": halves, "b": torch.tensor([True, False])[:1]})
    assert torch.equal(owned.value["c"], conjugate.resolve_conj())
    assert torch.equal(owned.value["n"], conjugate.imag.resolve_neg())
    assert owned.value["h"].view(torch.uint8).tolist() == [0, 1]
    assert owned.value["b"].tolist() == [True]


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
    from omni_fastpath.patches.save_queue_cap.payload import weigh

    tensor = torch.zeros(6, 4, dtype=torch.uint8)
    address = tensor.untyped_storage().data_ptr()
    assert weigh({"x": tensor, "y": [tensor, tensor.reshape(24)], "z": tensor.T}) == {address: (24, 24)}
    assert weigh([tensor[:1], tensor[5:]]) == {address: (24, 8)}


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


@pytest.mark.parametrize("steps", [0, 20], ids=["managed", "calm"])
def test_what_is_sent_is_what_was_queued(torch: Any, steps: int) -> None:
    """On a CPU the runner's buffer is overwritten by the next step while the chunk waits; the old content is sent."""
    from omni_fastpath.patches.save_queue_cap import slow
    from omni_fastpath.patches.save_queue_cap.calm import Calm

    with patched() as counters, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow, "SLOW_S", 3600.0)  # the blocker does not end the calm
        request, blocker = Request(unique("s")), Request(unique("blocker"))
        buffer = torch.zeros(4, dtype=torch.int64)
        with Stage(device="cpu", lanes=1, calm=Calm(steps=steps)) as stage:
            stage.gate.shut(blocker.external_req_id)
            stage.save(blocker, 0)
            until(lambda: stage.gate.inside)
            for value in range(6):
                buffer.fill_(value)
                stage.save(request, value, tensor=buffer)
                stage.queue.before_step()
            assert stage.queue.is_calm is bool(steps)
            buffer.fill_(POISON)
            stage.gate.open()
            stage.drain()
            assert stage.fetch(request.external_req_id) == list(range(6))
        assert counters["copied_tensors"] >= 6


def test_upstreams_runner_makes_new_memory_for_every_step(torch: Any) -> None:
    """Why nothing need be copied on a GPU: a payload is a part of what was made for its step, and of nothing else."""
    from vllm_omni.utils.mm_outputs import build_mm_cpu, to_payload_element

    graph_output = torch.zeros(4, 8)  # stands for what the next step writes into

    def payload() -> Any:
        moved = graph_output.clone()  # what ``.to("cpu")`` makes of a tensor on a GPU
        element = build_mm_cpu({"x": moved})["x"]
        return to_payload_element(element, 1, 1, 2, seq_len=4)

    first = payload()
    graph_output.fill_(POISON)
    second = payload()
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert first.untyped_storage().nbytes() == 4 * 8 * 4  # the whole batch lives as long as it
    assert first.tolist() == [[0.0] * 8]


def test_what_has_really_waited_lets_its_batch_go(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a batch whose others have left is copied, small as it is; a part that is most of one is not."""
    from omni_fastpath.patches.save_queue_cap import account
    from omni_fastpath.patches.save_queue_cap.fair import FairQueue
    from omni_fastpath.patches.save_queue_cap.payload import give
    from tests.patches.soak_stage import entry

    monkeypatch.setattr(account, "WAITED_S", 0.0)
    made = FairQueue(entry().counters)
    batch, prompt = torch.arange(64).reshape(64, 1), torch.arange(100)

    def queue(stream: str, tensor: Any) -> None:
        made.append({"request": Request(stream), "multimodal_output": {"x": tensor}})

    for row in range(64):
        queue(f"s{row}", batch[row : row + 1])
    queue("prompt", prompt[:90])
    assert made.nbytes == 64 * 8 + 800  # the batch once, however many tasks have a part of it
    made.account.let_batches_go(float("inf"))
    assert entry().counters["copied_tensors"] == 0  # all of it waits: nothing would be gained
    left = []
    for _ in range(60):
        task = made.popleft()
        left.append(task)
        made.sent(task, 0.0)
    assert made.nbytes == 64 * 8 + 800
    made.account.let_batches_go(float("inf"))
    assert entry().counters["copied_tensors"] == 4
    assert made.nbytes == 4 * 8 + 800
    batch.fill_(POISON)
    found = {}
    while made:
        task = made.popleft()
        found[task["request"].external_req_id] = give(task["multimodal_output"])["x"]
        made.sent(task, 0.0)
    assert [found[f"s{row}"].tolist() for row in range(60, 64)] == [[[row]] for row in range(60, 64)]
    assert found["prompt"].data_ptr() == prompt.data_ptr()
    assert made.nbytes == 0


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
