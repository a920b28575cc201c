"""Chunks in shared memory that the next stage has not fetched: which are counted, and until when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches.soak_stage import SHARED_MEMORY, Request, Stage, entry, patched, shared_memory, unique, until

pytestmark = pytest.mark.upstream


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with patched():
        yield


def counted(stage: Stage, request: Request) -> int:
    """Unfetched chunks that the queue knows of a stream."""
    stream = stage.queue.streams.get(request.external_req_id)
    return 0 if stream is None else int(stream.unfetched)


def look(stage: Stage) -> None:
    """Look now."""
    stage.queue.chunks._next_look_s = 0.0
    stage.queue.chunks.look(time.monotonic())


def send(stage: Stage, request: Request, count: int, *, finish: bool = False, size: int = 64) -> None:
    """Send so many chunks and wait for it."""
    for number in range(count):
        stage.save(request, number, size=size, finished=finish and number == count - 1)
    stage.drain()


def test_counted_from_the_put_to_the_fetch() -> None:
    """A chunk counts, with the size of its segment, until its receiver has unlinked it; then all is zero again."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 5)
        sizes = [(SHARED_MEMORY / name).stat().st_size for name in shared_memory() if not name.startswith("shm_")]
        assert (counted(stage, request), stage.queue.nbytes) == (5, sum(sizes))
        for fetched in range(1, 6):
            assert stage.fetch(request.external_req_id, 1) == [fetched - 1]
            look(stage)
            assert counted(stage, request) == 5 - fetched
        assert (stage.queue.nbytes, stage.queue.chunks.nbytes) == (0, 0)


def test_put_looks_at_its_own_stream_where_it_is_near_its_limit() -> None:
    """What was fetched before is known at the stream's next put, without a look of its own."""
    request = Request(unique("s"))
    with Stage() as stage:
        stage.queue.chunks._look_at = 4
        stage.queue.chunks.look = lambda now: None
        send(stage, request, 3)
        assert stage.fetch(request.external_req_id) == [0, 1, 2]
        send(stage, request, 1)
        assert counted(stage, request) == 1


def test_lanes_look_while_nothing_is_sent() -> None:
    """The receiver's fetches are noticed although the stream sends nothing more."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 3)
        assert stage.fetch(request.external_req_id) == [0, 1, 2]
        until(lambda: counted(stage, request) == 0, "the lanes' look")
        assert stage.queue.nbytes == 0


def test_wanted_look_comes_at_once() -> None:
    """Whoever waits for a fetch does not wait for the next quiet look."""
    request = Request(unique("s"))
    with Stage() as stage:
        chunks = stage.queue.chunks
        chunks._last_look_s = time.monotonic() - 1.0
        chunks._next_look_s = time.monotonic() + 3600.0
        chunks.put(request.external_req_id, "never-there", 1)
        assert chunks.want(0.5)


def test_many_fetched_between_two_looks() -> None:
    """However many chunks were fetched, one look finds the first that was not."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 12)
        stage.fetch(request.external_req_id, 9)
        look(stage)
        assert counted(stage, request) == 3


def test_only_with_shared_memory() -> None:
    """Behind another connector nothing is known and nothing counted."""
    request = Request(unique("s"))
    with Stage(memory=True) as stage:
        send(stage, request, 3)
        assert stage.queue.chunks is None
        assert counted(stage, request) == 0
        assert stage.queue.nbytes == 0


def packed(final: int) -> Any:
    """As the front end packs a request's additional information."""
    from vllm_omni.engine.serialization import serialize_additional_information

    return serialize_additional_information({"omni_final_stage_id": final, "speaker": "x"})


@pytest.mark.parametrize(
    ("information", "counts"),
    [
        (lambda: packed(0), False),
        (lambda: {"omni_final_stage_id": 0}, False),
        (lambda: packed(2), True),
        (lambda: {"omni_final_stage_id": 2}, True),
        (dict, True),
        (lambda: None, True),
    ],
    ids=["packed text-only", "text-only", "packed audio", "audio", "nothing said", "nothing"],
)
def test_text_only_request_has_no_receiver(information: Any, counts: bool) -> None:
    """Chunks of a request that ends at this stage are fetched by nobody and do not count; all others do."""
    request = Request(unique("s"))
    request.additional_information = information()
    with Stage() as stage:
        send(stage, request, 3, finish=True)
        assert counted(stage, request) == (3 if counts else 0)
        assert (stage.queue.nbytes > 0) is counts
        stage.fetch(request.external_req_id)


def test_end_of_the_request_still_counts_until_fetched() -> None:
    """The last chunks of a request that has ended count until they are fetched."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 4, finish=True)
        assert counted(stage, request) == 4
        stage.fetch(request.external_req_id)
        look(stage)
        assert (counted(stage, request), stage.queue.nbytes) == (0, 0)


def test_abort_cleans_up_and_counts_no_more() -> None:
    """Upstream's clean-up after an abort unlinks the chunks; they are not counted afterwards."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 4)
        stage.abort(request)
        stage.drain()
        until(lambda: not shared_memory(), "the clean-up")
        look(stage)
        assert (counted(stage, request), stage.queue.nbytes) == (0, 0)


def test_clean_up_is_known_without_a_look() -> None:
    """The lane that cleans up sees at once that the chunks are gone."""
    request = Request(unique("s"))
    with Stage() as stage:
        stage.queue.chunks.look = lambda now: None
        send(stage, request, 4)
        stage.abort(request)
        stage.drain()
        assert (counted(stage, request), stage.queue.nbytes) == (0, 0)


def test_streams_that_are_fetched_are_forgotten() -> None:
    """Of a stream whose chunks were all fetched, or cleaned up, nothing is kept to look at."""
    requests = [Request(unique(f"s{n}")) for n in range(3)]
    with Stage() as stage:
        for request in requests:
            send(stage, request, 2, finish=request is not requests[0])
        stage.abort(requests[0])
        stage.drain()
        for request in requests[1:]:
            stage.fetch(request.external_req_id)
        look(stage)
        assert stage.queue.chunks._streams == {}


def test_failed_put_is_no_chunk() -> None:
    """A send that failed left nothing in shared memory, its number is used again, and that chunk counts once."""
    request = Request(unique("s"))
    with Stage() as stage:
        stage.gate.fails[request.external_req_id] = None
        send(stage, request, 1)
        assert counted(stage, request) == 0
        send(stage, request, 1)
        assert counted(stage, request) == 1
        assert stage.fetch(request.external_req_id) == [0]


def test_abandoned_chunks_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For chunks that nobody fetches long after their request's end nobody is held; they count until they are gone."""
    from omni_fastpath.patches.save_queue_cap import unfetched

    ended, live = Request(unique("ended")), Request(unique("live"))
    with Stage() as stage:
        send(stage, ended, 3, finish=True)
        send(stage, live, 2)
        look(stage)
        assert (counted(stage, ended), counted(stage, live)) == (3, 2)
        monkeypatch.setattr(unfetched, "ABANDONED_S", -1.0)
        look(stage)
        assert (counted(stage, ended), counted(stage, live)) == (0, 2)
        assert entry().counters["abandoned_chunks"] == 3
        stage.fetch(live.external_req_id)
        look(stage)
        sizes = [(SHARED_MEMORY / name).stat().st_size for name in shared_memory() if not name.startswith("shm_")]
        chunks = stage.queue.chunks
        assert (len(sizes), stage.queue.nbytes, chunks.abandoned_nbytes) == (3, sum(sizes), sum(sizes))
        look(stage)
        assert entry().counters["abandoned_chunks"] == 3
        stage.fetch(ended.external_req_id)  # somebody comes after all
        look(stage)
        assert (stage.queue.nbytes, chunks.abandoned_nbytes, counted(stage, ended)) == (0, 0, 0)


def test_external_id_used_again_is_no_ended_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes up an ended one's id is live: its chunks are not given up with the old one's."""
    from omni_fastpath.patches.save_queue_cap import unfetched

    name = unique("s")
    with Stage() as stage:
        send(stage, Request(name, "old"), 2, finish=True)
        stage.fetch(name)
        send(stage, Request(name, "new"), 2)
        monkeypatch.setattr(unfetched, "ABANDONED_S", -1.0)
        look(stage)
        assert stage.queue.streams[name].unfetched == 2


def test_most_bytes_outstanding_are_noted() -> None:
    """The maximum of what was queued and not fetched is kept."""
    request = Request(unique("s"))
    with Stage() as stage:
        send(stage, request, 3, size=1000)
        most = entry().counters["max_outstanding_bytes"]
        assert most >= 3 * 8000
        stage.fetch(request.external_req_id)
        look(stage)
        assert entry().counters["max_outstanding_bytes"] == most
