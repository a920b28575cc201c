"""The sending side of a stage without a scheduler: the real adapter, its real connector or one in memory, and gates."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typing_extensions import Self

PATIENCE_S = 30.0
"""A guard, never something that a test measures."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)
_numbers = itertools.count()


def until(condition: Callable[[], Any], what: str = "what is waited for") -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.0005)


def unique(stem: str) -> str:
    """An external request id that nobody else has in shared memory."""
    return f"sq-{os.getpid()}-{next(_numbers)}-{stem}"


def shared_memory() -> list[str]:
    """What lies in shared memory under the ids of this process's tests."""
    return [
        name
        for path in SHARED_MEMORY.iterdir()
        if (name := path.name).removeprefix("shm_").startswith(f"sq-{os.getpid()}-")
    ]


def entry() -> Any:
    """The patch's entry in the ledger, also where nothing is installed."""
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches.save_queue_cap import PATCH

    return LEDGER.entry(PATCH)


@contextmanager
def patched(**values: Any) -> Iterator[dict[str, int]]:
    """``save_queue_cap`` installed with these values and taken off afterwards; its counters."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.patches import PATCHES

    apply(config.resolve([], {"OMNI_FASTPATH_SAVE_QUEUE_CAP": "1"}, PATCHES), Process.STAGE)
    ours = entry()
    assert ours.state is State.APPLIED, ours.reason
    before, ours.options = ours.options, ours.patch.options(**values)
    try:
        yield ours.counters
    finally:
        ours.options = before
        for patch in reversed(PATCHES):
            uninstall(patch)


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


def send_codes(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> Any:
    """An input processor that sends what was queued, keeping nothing."""
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    if multimodal_output is None:
        return None
    return OmniPayloadStruct(codes=CodesStruct(audio=multimodal_output["codes"]["audio"]))


class Gate:
    """In front of a connector's ``put``: stops chosen streams, fails chosen chunks, notes who sends."""

    def __init__(self, connector: Any) -> None:
        self._put = connector.put
        connector.put = self.put
        self._shut: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.fails: dict[str, BaseException | None] = {}
        """Next ``put`` of a stream: raise this, or report failure for None."""
        self.inside: dict[str, str] = {}
        """Stream: name of the thread that sends a chunk of it."""
        self.overlaps: list[str] = []
        """Streams of which two threads sent at a time."""
        self.order: list[str] = []
        """Streams of the chunks put, in the order in which their puts began."""

    def shut(self, *streams: str) -> None:
        """Stop the sends of these streams inside ``put``."""
        for stream in streams:
            self._shut[stream] = threading.Event()

    def is_shut(self, stream: str) -> bool:
        """Whether this stream's sends are stopped."""
        return stream in self._shut

    def open(self, *streams: str) -> None:
        """Let them go on; all of them if none is named."""
        for stream in streams or tuple(self._shut):
            self._shut.pop(stream).set()

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        """Upstream's ``put`` behind the gate."""
        stream = put_key.rsplit("_", 2)[0]
        with self._lock:
            if stream in self.inside:
                self.overlaps.append(stream)
            self.inside[stream] = threading.current_thread().name
            self.order.append(stream)
        try:
            gate = self._shut.get(stream)
            if gate is not None:
                assert gate.wait(PATIENCE_S)
            if stream in self.fails:
                error = self.fails.pop(stream)
                if error is not None:
                    raise error
                return False, 0, None
            return self._put(from_stage, to_stage, put_key, data)
        finally:
            with self._lock:
                self.inside.pop(stream, None)


def slow_down(connector: Any, seconds: float) -> None:
    """Each ``put`` takes that much longer."""
    put = connector.put

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return put(*args, **kwargs)

    connector.put = slow


def _memory_connector() -> Any:
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

    class Memory(SharedMemoryConnector):  # type: ignore[misc]  # upstream is not typed here
        """Chunks in a dict; what it takes is copied, as serialisation does. Clean-up tasks come as with the real."""

        def __init__(self) -> None:
            super().__init__({"stage_id": 0})
            self.chunks: dict[str, Any] = {}

        def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            codes = None if data.codes is None or data.codes.audio is None else data.codes.audio.tolist()
            self.chunks[put_key] = {"codes": {"audio": codes}, "meta": {"finished": bool(data.meta.finished)}}
            return True, 1, None

        def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> Any:
            chunk = self.chunks.pop(get_key, None)
            return None if chunk is None else (chunk, 1)

        def cleanup(self, request_id: str) -> None:
            self.chunks.pop(request_id, None)

        def close(self) -> None:
            self.chunks.clear()

    return Memory()


class Stage:
    """A stage's adapter with the patch's queue attached, and the next stage's side; a context manager.

    Args:
        memory: Chunks in memory instead of shared memory.
        lanes: Threads that send.
        device: Kind of device that the payloads come from.
        attach: False leaves upstream's queue.
        calm: Until when its queue is calm; never unless given.
    """

    def __init__(
        self,
        *,
        memory: bool = False,
        lanes: int = 2,
        device: str = "cuda",
        attach: bool = True,
        calm: Any = None,
    ) -> None:
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
        from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
            OmniChunkTransferAdapter,
        )

        from omni_fastpath.patches.save_queue_cap import wrappers
        from omni_fastpath.patches.save_queue_cap.calm import Calm

        model = SimpleNamespace(
            stage_id=0,
            stage_connector_config={"name": "SharedMemoryConnector", "extra": {"stage_id": 0}},
            async_chunk=True,
            max_model_len=4096,
            worker_type="ar",
            custom_process_next_stage_input_func=None,
        )
        config = SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_seqs=64, async_scheduling=True),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            device_config=SimpleNamespace(device_type=device),
        )
        self.adapter = OmniChunkTransferAdapter(config)
        self.adapter.custom_process_next_stage_input_func = send_codes
        if memory:
            self.adapter.connector = _memory_connector()
        self.connector = self.adapter.connector
        self.gate = Gate(self.connector)
        calm = calm or Calm(steps=0)
        self.queue: Any = (
            wrappers._attach(self.adapter, config, entry().options, calm) if attach else self.adapter._pending_save_reqs
        )
        self.lanes = [self.adapter.save_thread]
        if attach:
            self.lanes = list(self.queue.lanes)
            while len(self.lanes) < lanes:
                lane = threading.Thread(target=self.adapter.save_loop, daemon=True, name=f"lane-{len(self.lanes)}")
                lane.start()
                self.queue.add_lane(lane)
                self.lanes.append(lane)
        self.receiver = self.connector if memory else SharedMemoryConnector({"stage_id": 1})
        self.received: dict[str, list[int]] = defaultdict(list)
        self.ended: set[str] = set()
        self._next: dict[str, int] = defaultdict(int)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self.adapter.shutdown()
        for thread in (*self.lanes, self.adapter.recv_thread):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} still waits after the end"
        for name in shared_memory():
            (SHARED_MEMORY / name).unlink(missing_ok=True)

    # ---- The producer ----

    def save(self, request: Request, value: int, *, size: int = 1, finished: bool = False, tensor: Any = None) -> None:
        """Queue a step's payload that says *value*; *finished* ends the request with it."""
        import torch

        request.num_computed_tokens += 1
        request.finished = finished
        payload = torch.full((size,), value, dtype=torch.int64) if tensor is None else tensor
        self.adapter.save_async({"codes.audio": payload}, request)

    def abort(self, request: Request) -> None:
        """What the scheduler does when a client goes away."""
        from vllm.v1.request import RequestStatus

        request.finished = True
        request.status = RequestStatus.RUNNING  # type: ignore[attr-defined]  # read by finish_requests alone
        self.adapter.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED, {request.request_id: request})

    def drain(self) -> None:
        """Wait until nothing is queued or in flight."""
        until(lambda: self.queue.tasks == 0, "the queue's end")

    # ---- The next stage ----

    def fetch(self, stream: str, count: int | None = None) -> list[int]:
        """Fetch a stream's next chunks, *count* of them or all that are there; the values that they say."""
        found: list[int] = []
        while count is None or len(found) < count:
            result = self.receiver.get("0", "1", f"{stream}_0_{self._next[stream]}")
            if result is None:
                break
            self._next[stream] += 1
            audio = (result[0].get("codes") or {}).get("audio")
            found.append(-1 if audio is None else int(audio[0]))
            if bool((result[0].get("meta") or {}).get("finished")):
                self.ended.add(stream)
                self._next[stream] = 0
                break
        self.received[stream] += found
        return found
