"""The queue under upstream's own adapter and ``save_loop``: slow sends, failures, aborts, ends."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.soak_stage import Request, Stage, patched, shared_memory, unique, until

pytestmark = pytest.mark.upstream

MEDIA = pytest.mark.parametrize("memory", [True, False], ids=["memory", "shared-memory"])


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    with patched():
        yield


def queue_values(stage: Stage, request: Request, values: range, *, finish: bool = False) -> None:
    """Queue a payload for each value; the last ends the request if asked for."""
    for value in values:
        stage.save(request, value, finished=finish and value == values[-1])


# ---- Under the real loop ----


@MEDIA
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_chunk_once_and_in_order(memory: bool, lanes: int) -> None:
    """What several streams queue in turns arrives per stream complete, in order, with its end."""
    requests = [Request(unique(f"s{n}")) for n in range(5)]
    with Stage(memory=memory, lanes=lanes) as stage:
        for value in range(40):
            for request in requests:
                stage.save(request, value, size=50, finished=value == 39)
        stage.drain()
        for request in requests:
            assert stage.fetch(request.external_req_id) == list(range(40))
        assert stage.ended == {request.external_req_id for request in requests}
        assert not stage.gate.overlaps
        assert (stage.queue.tasks, len(stage.queue)) == (0, 0)
        assert not shared_memory()


def test_lanes_run_upstreams_own_loop() -> None:
    """With shared memory and an audited input processor two threads run ``save_loop``; else upstream's one alone."""
    from omni_fastpath.patches.save_queue_cap import attach

    with Stage(memory=True, lanes=1) as stage:
        assert stage.lanes == [stage.adapter.save_thread]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "AUDITED_PROCESSORS", frozenset({"tests.patches.soak_stage.send_codes"}))
        with Stage(lanes=1) as stage:
            assert len(stage.lanes) == 2
            assert stage.adapter.save_thread in stage.lanes
        with Stage(memory=True, lanes=1) as stage:
            assert stage.lanes == [stage.adapter.save_thread]


@MEDIA
def test_slow_stream_leaves_the_others_alone(memory: bool) -> None:
    """While a send of one stream does not end, the others' chunks go out on the other lane."""
    slow, quick = Request(unique("slow")), Request(unique("quick"))
    with Stage(memory=memory) as stage:
        stage.gate.shut(slow.external_req_id)
        queue_values(stage, slow, range(10))
        queue_values(stage, quick, range(10), finish=True)
        until(lambda: stage.fetch(quick.external_req_id) is not None and quick.external_req_id in stage.ended)
        assert stage.queue.streams[slow.external_req_id].tasks == 10
        stage.gate.open()
        stage.drain()
        assert stage.fetch(slow.external_req_id) == list(range(10))
        assert not stage.gate.overlaps


def test_two_slow_streams_and_two_lanes() -> None:
    """Two streams that hang take both lanes; when one of them goes on, everybody does, complete and in order."""
    slow = [Request(unique("slow")) for _ in range(2)]
    quick = Request(unique("quick"))
    with Stage(memory=True) as stage:
        stage.gate.shut(*(each.external_req_id for each in slow))
        for each in slow:
            queue_values(stage, each, range(5))
        until(lambda: len(stage.gate.inside) == 2, "both lanes hanging")
        queue_values(stage, quick, range(5))
        assert stage.fetch(quick.external_req_id) == []
        stage.gate.open(slow[0].external_req_id)
        until(lambda: stage.queue.tasks == 5, "all but the stream that still hangs")
        assert stage.fetch(quick.external_req_id) == list(range(5))
        stage.gate.open()
        stage.drain()
        for each in slow:
            assert stage.fetch(each.external_req_id) == list(range(5))


def test_send_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slow sends took, failed or not, is charged, after a first: 1 each, by a clock that counts its calls."""
    from omni_fastpath.patches.save_queue_cap import sending
    from omni_fastpath.patches.save_queue_cap.turns import FLAT_S

    request = Request(unique("s"))
    with Stage(memory=True, lanes=1) as stage:
        clock = itertools.count()
        monkeypatch.setattr(sending, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        stage.gate.fails[request.external_req_id] = RuntimeError("connector")
        queue_values(stage, request, range(4))
        stage.drain()
        assert stage.queue.streams[request.external_req_id].virtual_s == FLAT_S + 3.0


def test_only_the_first_lane_reaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's loop reaps each time that it runs dry, 64 system calls; the helper, which is mostly dry, does not."""
    from omni_fastpath.patches.save_queue_cap import attach
    from omni_fastpath.patches.save_queue_cap.queue import SaveQueue

    monkeypatch.setattr(attach, "AUDITED_PROCESSORS", frozenset({"tests.patches.soak_stage.send_codes"}))
    reaping: set[threading.Thread] = set()
    request = Request(unique("s"))
    with Stage(lanes=1) as stage:
        assert len(stage.lanes) == 2
        monkeypatch.setattr(stage.connector, "reap_consumed", lambda: reaping.add(threading.current_thread()))
        asked: Counter[threading.Thread] = Counter()
        ask = SaveQueue.__bool__

        def counted(queue: SaveQueue) -> bool:
            asked[threading.current_thread()] += 1
            return ask(queue)

        monkeypatch.setattr(SaveQueue, "__bool__", counted)
        queue_values(stage, request, range(20), finish=True)
        stage.drain()
        until(lambda: all(asked[lane] >= 5 for lane in stage.lanes), "each lane running dry twice")
        assert reaping == {stage.adapter.save_thread}


def test_idle_lane_wakes_for_a_task() -> None:
    """A task that comes when every lane sleeps is sent, again and again."""
    request = Request(unique("s"))
    with Stage(memory=True) as stage:
        for value in range(30):
            stage.save(request, value)
            stage.drain()
        assert stage.fetch(request.external_req_id) == list(range(30))


# ---- Failures ----


@MEDIA
@pytest.mark.parametrize("error", [RuntimeError("connector"), None], ids=["raises", "reports failure"])
def test_send_failure_releases_its_stream(memory: bool, error: BaseException | None) -> None:
    """After a failed send its stream's next chunk goes out, and the failure is upstream's to handle."""
    request, other = Request(unique("s"), "internal"), Request(unique("t"))
    with Stage(memory=memory) as stage:
        stage.gate.shut(request.external_req_id)
        queue_values(stage, request, range(3))
        until(lambda: stage.gate.inside)
        stage.gate.fails[request.external_req_id] = error
        stage.gate.open()
        queue_values(stage, other, range(2))
        stage.drain()
        assert list(stage.adapter.collect_failed_send_request_ids()) == ["internal"]
        assert stage.fetch(request.external_req_id) == [1, 2]
        assert stage.fetch(other.external_req_id) == [0, 1]
        until(lambda: stage.queue.nbytes == 0, "the look at what was fetched")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lane_that_dies_leaves_the_other_one_going() -> None:
    """A lane that is ended by what ``save_loop`` does not catch strands nothing: the other lane sends the rest."""
    request, other = Request(unique("s")), Request(unique("t"))
    with Stage(memory=True) as stage:
        stage.gate.fails[request.external_req_id] = SystemExit()
        queue_values(stage, request, range(5))
        until(lambda: sum(thread.is_alive() for thread in stage.lanes) == 1, "a lane's death")
        queue_values(stage, other, range(5))
        stage.drain()
        assert stage.fetch(request.external_req_id) == [1, 2, 3, 4]
        assert stage.fetch(other.external_req_id) == list(range(5))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_save_thread_blocks_nobody() -> None:
    """With the only lane dead the producer goes on and the queue says how much it has."""
    request = Request(unique("s"))
    with Stage(memory=True, lanes=1) as stage:
        stage.gate.fails[request.external_req_id] = SystemExit()
        stage.save(request, 0)
        until(lambda: not stage.adapter.save_thread.is_alive())
        queue_values(stage, request, range(1, 6))
        assert (len(stage.queue), stage.queue.tasks) == (5, 5)


@pytest.mark.parametrize("error", [OSError(36, "File name too long"), ValueError("embedded null byte")])
def test_look_at_shared_memory_that_fails_does_not_fail_the_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that was sent was sent, whatever goes wrong when its size is looked at."""
    from omni_fastpath.patches.save_queue_cap import unfetched

    def broken(*_: object, **__: object) -> None:
        raise error

    request = Request(unique("s"))
    with Stage() as stage:
        with monkeypatch.context() as patch:
            patch.setattr(unfetched, "os", SimpleNamespace(stat=broken, path=os.path))
            stage.save(request, 0, finished=True)  # of the last chunk the size is looked up
            stage.drain()
        assert stage.adapter.collect_failed_send_request_ids() == {}
        assert stage.fetch(request.external_req_id) == [0]


# ---- Aborts ----


@MEDIA
def test_aborted_backlog_is_discarded_and_cleaned_up(memory: bool) -> None:
    """An abort in the middle of a send: queued chunks are discarded, sent ones unlinked, and nothing is counted."""
    request = Request(unique("s"))
    with Stage(memory=memory) as stage:
        queue_values(stage, request, range(3))
        stage.drain()
        stage.gate.shut(request.external_req_id)
        queue_values(stage, request, range(3, 8))
        until(lambda: stage.gate.inside)
        stage.abort(request)
        stage.gate.open()
        stage.drain()
        assert stage.queue.tasks == 0
        until(lambda: stage.queue.nbytes == 0, "the look at what was cleaned up")
        assert stage.fetch(request.external_req_id) == []
        assert not shared_memory()
        assert not stage.adapter._sender_tokens


@MEDIA
def test_external_id_used_again_after_an_abort(memory: bool) -> None:
    """The old request's clean-up stands before the new one's chunks: all of them arrive, from the first on."""
    name = unique("s")
    old, blocker = Request(name, "old"), Request(unique("blocker"))
    with Stage(memory=memory, lanes=1) as stage:
        queue_values(stage, old, range(3))
        stage.drain()
        stage.gate.shut(blocker.external_req_id)
        stage.save(blocker, 0)
        until(lambda: stage.gate.inside)
        queue_values(stage, old, range(3, 6))  # waiting behind the blocker
        stage.abort(old)
        new = Request(name, "new")
        queue_values(stage, new, range(100, 104), finish=True)
        stage.gate.open()
        stage.drain()
        assert stage.fetch(name) == [100, 101, 102, 103]
        assert name in stage.ended


def test_terminal_that_waits_survives_the_abort() -> None:
    """A request's end that is queued when the request is aborted is still sent, after its backlog: upstream's fence."""
    request = Request(unique("s"))
    with Stage(memory=True) as stage:
        stage.gate.shut(request.external_req_id)
        queue_values(stage, request, range(4), finish=True)
        until(lambda: stage.gate.inside)
        stage.abort(request)
        stage.gate.open()
        stage.drain()
        stage.fetch(request.external_req_id)
        assert request.external_req_id in stage.ended


def test_segment_ends_keep_their_place() -> None:
    """A resumable session: the end of a segment goes out between the chunks before and those of the next segment."""
    request, blocker = Request(unique("s")), Request(unique("blocker"))
    request.resumable = True
    with Stage(memory=True, lanes=1) as stage:
        stage.gate.shut(blocker.external_req_id)
        stage.save(blocker, 0)
        until(lambda: stage.gate.inside)
        for segment in range(3):
            queue_values(stage, request, range(10 * segment, 10 * segment + 3))
            request.num_computed_tokens += 1
            stage.adapter.save_async(None, request, is_segment_finished=True, segment_generation=segment)
            request._omni_segment_generation = segment + 1  # type: ignore[attr-defined]  # upstream sets it, too
            request.num_computed_tokens = 0
        request.resumable = False
        stage.save(request, 99, finished=True)
        stage.gate.open()
        stage.drain()
        assert stage.fetch(request.external_req_id) == [0, 1, 2, -1, 10, 11, 12, -1, 20, 21, 22, -1, 99]
        assert request.external_req_id in stage.ended


# ---- Ends ----


@pytest.mark.parametrize("lanes", [1, 2])
def test_teardown_with_a_backlog_ends_every_thread(lanes: int) -> None:
    """A stage that stops in the middle of a send with tasks queued leaves no thread and starts no further send."""
    requests = [Request(unique(f"s{n}")) for n in range(4)]
    with Stage(memory=True, lanes=lanes) as stage:
        stage.gate.shut(*(each.external_req_id for each in requests))
        for each in requests:
            queue_values(stage, each, range(20))
        until(lambda: len(stage.gate.inside) == lanes)
        stage.adapter.shutdown()
        begun = len(stage.gate.order)
        stage.gate.open()
    # a lane finishes the inner loop of save_loop, as upstream's does with its deque
    assert len(stage.gate.order) >= begun
    assert not any(thread.is_alive() for thread in stage.lanes)


def test_upstreams_deque_is_served_as_before() -> None:
    """A stage without our queue sends as upstream does although the patch is installed."""
    request = Request(unique("s"))
    with Stage(memory=True, attach=False) as stage:
        queue_values(stage, request, range(5))
        until(lambda: len(stage.connector.chunks) == 5)
        assert stage.fetch(request.external_req_id) == list(range(5))


# ---- What two lanes may touch ----


def audited() -> list[str]:
    """Input processors that two lanes run."""
    from omni_fastpath.patches.save_queue_cap.attach import AUDITED_PROCESSORS

    return sorted(AUDITED_PROCESSORS)


def load(path: str) -> Any:
    """The function of that dotted path."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(path)


class OwnStreamOnly(defaultdict[str, Any]):
    """State per stream in which nobody may look at all streams: another lane changes it meanwhile."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    __iter__ = keys = values = items = _refuse


class Manager:
    """What an input processor sees of the adapter. It may not make state of its own there: two lanes would make two."""

    def __init__(self) -> None:
        hf_config = SimpleNamespace(talker_config=SimpleNamespace(accept_hidden_layer=18))
        self.config = SimpleNamespace(hf_config=hf_config)
        self.connector = SimpleNamespace(config={"extra": {"codec_chunk_frames": 4, "codec_left_context_frames": 2}})
        self.scheduler_max_num_seqs = 64
        self.put_req_chunk = OwnStreamOnly(int)
        self.ramp_chunk_count = OwnStreamOnly(int)
        self.request_payload = OwnStreamOnly(lambda: None)
        self.code_prompt_token_ids = OwnStreamOnly(list)
        self._adaptive_states = OwnStreamOnly(lambda: None)
        self._pending_streaming_prefills = OwnStreamOnly(lambda: None)
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_made", False) and not isinstance(value, (int, tuple)):
            assert not isinstance(value, dict), f"{name} is made by whoever comes first; with two lanes, twice"
        super().__setattr__(name, value)


def test_audited_processors_keep_to_their_own_stream() -> None:
    """An input processor that two lanes run neither looks at all streams nor makes state that all streams share."""
    assert audited()
    for path in audited():
        drive(load(path), Manager())


def test_qwen3_tts_is_not_for_two_lanes() -> None:
    """Why it is not among the audited: it goes through all streams to count the active ones."""
    path = "vllm_omni.model_executor.stage_input_processors.qwen3_tts.talker2code2wav_async_chunk"
    assert path not in audited()
    with pytest.raises((RuntimeError, AssertionError), match=r"changed size|made by whoever"):
        drive(load(path), Manager())


def drive(processor: Any, manager: Manager) -> None:
    """Ten steps of one stream through an input processor."""
    import torch

    payloads: list[Any] = [
        {
            "hidden_states": {"layers": {0: torch.ones(1, 8), 18: torch.ones(1, 8)}},
            "codes": {"audio": torch.ones(1, 16)},
        },
        None,
    ]
    for step in range(10):
        request: Any = SimpleNamespace(
            external_req_id="s",
            resumable=False,
            is_finished=lambda: False,
            all_token_ids=[1] * (5 + step),
            prompt_token_ids=[1] * 5,
            output_token_ids=[1] * step,
            num_computed_tokens=5 + step,
            additional_information=None,
            sampling_params=None,
        )
        ends = step == 9
        payload = processor(
            transfer_manager=manager, multimodal_output=payloads[ends], request=request, is_finished=ends
        )
        if payload is not None:
            manager.put_req_chunk["s"] += 1


def test_serialiser_serves_two_threads() -> None:
    """Two threads that serialise at once get what each gets alone."""
    import torch
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    def chunk(value: int) -> Any:
        audio = torch.full((value % 977,), value, dtype=torch.int64)
        return OmniPayloadStruct(codes=CodesStruct(audio=audio), meta=MetaStruct(finished=torch.tensor(data=True)))

    alone = [OmniSerializer.serialize(chunk(value)) for value in range(400)]
    found: dict[int, list[bytes]] = {}

    def serialise(half: int) -> None:
        found[half] = [OmniSerializer.serialize(chunk(value)) for value in range(half, 400, 2)]

    threads = [threading.Thread(target=serialise, args=(half,)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[half] for half in range(2)] == [alone[0::2], alone[1::2]]
