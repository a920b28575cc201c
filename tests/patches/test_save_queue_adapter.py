"""The queue under upstream's own adapter, save thread and connector: order, failures, aborts, ends, stepping aside."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.declare import State
from tests.patches.save_path import Gate, entry, patched, unique, until
from tests.patches.small_stage import SmallStage, stage_config

pytestmark = pytest.mark.upstream


@pytest.fixture(autouse=True)
def _patch() -> Iterator[None]:
    """The patch is on."""
    with patched():
        yield


@pytest.fixture(autouse=True, scope="module")
def _config(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The configuration of every stage."""
    Stage.config = stage_config(tmp_path_factory.mktemp("model"))


class Request:
    """What the adapter reads of a request."""

    def __init__(self, external_req_id: str, request_id: str | None = None) -> None:
        self.external_req_id = external_req_id
        self.request_id = request_id or external_req_id
        self.resumable = False
        self.finished = False
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.additional_information: Any = None
        self.prompt_token_ids = [1]

    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.finished


class Stage(SmallStage):
    """A stage with the patch's queue, a gate in front of its connector, and the next stage's side.

    Args:
        device: Kind of device that the payloads come from.
    """

    config: Any = None

    def __init__(self, *, device: str = "cuda") -> None:
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        super().__init__(self.config, device=device)
        self.gate = Gate(self.adapter.connector)
        self.receiver = SharedMemoryConnector({"stage_id": 1})
        self.ended: set[str] = set()
        self._next: dict[str, int] = {}

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        super().__exit__()

    def save(self, request: Request, *values: int, finish: bool = False) -> None:
        """Queue a payload for each value; the last ends the request if asked for."""
        import torch

        self.streams.add(request.external_req_id)
        for value in values:
            request.num_computed_tokens += 1
            request.finished = finish and value == values[-1]
            self.adapter.save_async({"codes.audio": torch.full((4,), value, dtype=torch.int64)}, request)

    def abort_request(self, request: Request) -> None:
        """What the scheduler does when a client goes away."""
        from vllm.v1.request import RequestStatus

        request.finished = True
        request.status = RequestStatus.RUNNING  # type: ignore[attr-defined]  # read by finish_requests alone
        self.adapter.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED, {request.request_id: request})

    def block(self) -> Request:
        """Let the save thread stand in a send of another request until the gate opens."""
        blocker = Request(unique("blocker"))
        self.gate.shut(blocker.external_req_id)
        self.save(blocker, 0)
        until(lambda: self.gate.inside, "the send that blocks")
        return blocker

    def drain(self) -> None:
        """Open the gate and wait until nothing is queued and the save thread sleeps: its last send is over."""
        self.gate.open()
        until(self.is_idle, "the end of the last send")

    def is_idle(self) -> bool:
        """Whether nothing is queued and the save thread waits for more; a queue that stepped aside has no `sending`."""
        with self.adapter._save_cond:
            return not len(self.queue) and bool(self.adapter._save_cond._waiters)

    def look(self) -> None:
        """Wait until the save thread has looked at what was fetched."""
        self.queue._next_check_s = 0.0
        until(lambda: self.queue._next_check_s, "a look")

    def fetch(self, request: Request, count: int | None = None) -> list[int]:
        """A stream's next chunks, so many or all that are there; the values that they say."""
        found: list[int] = []
        stream = request.external_req_id
        while count is None or len(found) < count:
            number = self._next.get(stream, 0)
            result = self.receiver.get("0", "1", f"{stream}_0_{number}")
            if result is None:
                break
            self._next[stream] = number + 1
            audio = (result[0].get("codes") or {}).get("audio")
            found.append(-1 if audio is None else int(audio[0]))
            if bool((result[0].get("meta") or {}).get("finished")):
                self.ended.add(stream)
                break
        return found


# ---- Failures, aborts and ends ----


def test_aborted_backlog_is_discarded_and_cleaned_up() -> None:
    """An abort in the middle of a send: queued chunks are discarded, sent ones unlinked, and nothing is counted."""
    request = Request(unique("s"))
    with Stage() as stage:
        stage.save(request, 0, 1, 2)
        stage.drain()
        stage.gate.shut(request.external_req_id)
        stage.save(request, *range(3, 8))
        until(lambda: stage.gate.inside)
        stage.abort_request(request)
        stage.drain()
        stage.look()
        until(lambda: stage.queue.nbytes == 0, "the look at what was cleaned up")
        assert stage.fetch(request) == []
        assert not stage.segments(request.external_req_id)
        assert not stage.adapter._sender_tokens


def test_external_id_used_again_after_an_abort() -> None:
    """The old request's clean-up stands before the new one's chunks: all of them arrive, from the first on."""
    name = unique("s")
    old, new = Request(name, "old"), Request(name, "new")
    with Stage() as stage:
        stage.save(old, 0, 1, 2)
        stage.drain()
        stage.block()
        stage.save(old, 3, 4, 5)
        stage.abort_request(old)
        stage.save(new, *range(100, 104), finish=True)
        stage.drain()
        assert stage.fetch(new) == [100, 101, 102, 103]
        assert name in stage.ended


# ---- What counts ----


@pytest.mark.parametrize(
    ("information", "counts"),
    [
        (None, True),
        ({"omni_final_stage_id": 1}, True),
        ({"omni_final_stage_id": 0}, False),
        ({"other": 1}, True),
        (SimpleNamespace(entries={"omni_final_stage_id": SimpleNamespace(scalar_data=0)}), False),
        (SimpleNamespace(entries={}), True),
    ],
)
def test_segments_count_until_fetched_and_those_of_text_alone_never(information: Any, counts: bool) -> None:
    """The sizes of the segments that were put; nobody fetches those of a request that ends at this stage."""
    request = Request(unique("s"))
    request.additional_information = information
    with Stage() as stage:
        stage.save(request, *range(5))
        stage.drain()
        found = stage.segments(request.external_req_id)
        sizes = [path.stat().st_size for path in found if not path.name.startswith("shm_")]
        assert len(sizes) == 5
        assert stage.queue.nbytes == (sum(sizes) if counts else 0)
        assert stage.queue.of(request.external_req_id) == (stage.queue.nbytes, 0)
        stage.fetch(request, 3)
        stage.look()
        until(lambda: stage.queue.nbytes == (sum(sizes[:2]) if counts else 0), "the look at what was fetched")


def test_chunks_of_a_stream_whose_last_put_failed_count_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream keeps the sender token of such a stream, so that a token does not say that more is put."""
    from omni_fastpath.patches.save_queue_cap import save_queue

    ahead_s = 0.0
    monkeypatch.setattr(save_queue, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    request = Request(unique("s"))
    with Stage() as stage:
        stage.save(request, 0, 1, 2)
        stage.drain()
        monkeypatch.setattr(stage.adapter.connector, "put", lambda *_, **__: (False, 0, None))
        stage.save(request, 3, finish=True)
        stage.drain()
        assert request.external_req_id in stage.adapter._sender_tokens
        assert stage.queue.nbytes > 0
        for _ in range(3):
            ahead_s += 25.0
            stage.look()
        until(lambda: stage.queue.nbytes == 0, "the look after a minute")


# ---- Stepping aside ----


def test_setting_up_that_fails_leaves_upstreams_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage starts all the same, and the state says what happened; here after everything was made."""
    report = entry().report

    def failing(state: State, reason: str) -> None:
        if state is State.APPLIED:
            raise RuntimeError("injected")
        report(state, reason)

    monkeypatch.setattr(entry(), "report", failing)
    request = Request(unique("s"))
    with Stage() as stage:
        assert type(stage.queue) is deque
        assert (entry().state, "injected" in entry().reason) == (State.FAILED, True)
        stage.save(request, 0)
        until(lambda: stage.fetch(request) == [0])
