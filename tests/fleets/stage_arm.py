"""One arm of a fleet: upstream's stage, driven through the script, with everything written down."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from benchmarks.rigs.engine_requests import engine_request
from benchmarks.save_queue.rig import Rig, Step, shared_memory
from tests.fleets.stage_parts import Clock, Gate, Runner, connector_of, digest, number_of
from tests.fleets.stage_script import BLOCK, MAX_MODEL_LEN, Fleet, Segment, Stream

MOST_TURNS = 40_000
MOST_S = 40.0
IDLE_TURNS = 200
"""Turns without a step after which nothing comes of itself any more: longer than arrivals and hung sends last."""

_numbers = itertools.count()


@dataclass
class Record:
    """What became of one stream.

    Attributes:
        fate: "completed", "aborted" or "failed" (upstream ended it with an error).
        puts: Chunks that the connector was given.
        tokens: It sampled.
        visible: What of its payloads clients may see, as digests.
        ended: Finish reasons of its outputs.
        prefills: Outputs with prefill statistics.
        received: Chunks that the receiver got.
        is_preempted: Whether it ever was.
        left: What is kept of it at the end: attributes of upstream's adapter, and "connector".
    """

    fate: str = "completed"
    puts: list[Any] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    visible: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    prefills: int = 0
    received: int = 0
    is_preempted: bool = False
    left: set[str] = field(default_factory=set)


@dataclass
class _Task:
    number: int
    stream: str
    content: str | None
    began: bool = False
    ended: bool = False


class _Deque(deque[Any]):
    """Upstream's queue, of which an instance can have its own `append`."""


class _Config:
    """A pickled config, changed for a fleet; read as a file is."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path, self._fleet = path, fleet

    def read_bytes(self) -> bytes:
        """The changed config."""
        from vllm.config.lora import LoRAConfig

        fleet = self._fleet
        config = pickle.loads(self._path.read_bytes())  # noqa: S301 - our own file
        config.model_config.max_model_len = MAX_MODEL_LEN
        config.cache_config.block_size = BLOCK
        config.cache_config.enable_prefix_caching = False
        scheduling = config.scheduler_config
        scheduling.max_model_len = MAX_MODEL_LEN
        scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = fleet.max_batched
        if fleet.max_loras:
            config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=fleet.max_loras)
        return pickle.dumps(config)


class Arm(Rig):
    """A stage that goes through a fleet's script.

    Args:
        config: As `stage_configs` wrote it.
        fleet: The script.
        clock: What the patch's modules see.
    """

    def __init__(self, config: Path, fleet: Fleet, clock: Clock) -> None:
        from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
            OmniChunkTransferAdapter,
        )

        self.fleet, self.clock = fleet, clock
        self.prefix = f"fl{os.getpid()}x{next(_numbers)}-"  # shared memory is everybody's
        self.records: dict[str, Record] = {each.name: Record() for each in fleet.streams}
        self.defects: list[str] = []
        self._threads = set(threading.enumerate())
        connector = connector_of(fleet.connector, fleet.stage)
        with mock.patch.object(OmniChunkTransferAdapter, "create_connector", return_value=connector):
            super().__init__(
                cast(Path, _Config(config, fleet)),
                max_num_seqs=fleet.max_num_seqs,
                kv_cache_mib=fleet.kv_mib,
                async_scheduling=fleet.asynchronous,
                device_type=fleet.device,
            )
        layer = int(self.vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)
        self.fleet_runner = Runner(fleet, (0, layer), self.prefix)
        self.streams = {each.name: each for each in fleet.streams}
        self.gate = Gate(self.connector, self.prefix, self.streams)
        self.outside = connector_of(fleet.connector, fleet.stage + 1, getattr(connector, "chunks", None))
        self._arrived: dict[str, int] = {}
        self._updates: dict[str, list[Segment | None]] = {}
        self._fed: Counter[str] = Counter()
        self._has_all: set[str] = set()
        self._tasks: list[_Task] = []
        self._last_sent: dict[str, int] = {}
        self._lock = threading.Lock()
        self._watch()

    # ---- What is written down ----

    def _watch(self) -> None:
        adapter = self.adapter
        if type(adapter._pending_save_reqs) is deque:
            adapter._pending_save_reqs = _Deque()
        queue = adapter._pending_save_reqs
        append, send, preempt = queue.append, adapter._send_single_request, self.scheduler._preempt_request

        def watched_append(task: Any) -> None:
            with self._lock:
                content = digest(task["multimodal_output"]) if "request" in task else None
                task["_fleet"] = _Task(len(self._tasks), self._stream_of(task), content)
                self._tasks.append(task["_fleet"])
            append(task)

        def watched_send(task: Any) -> None:
            known: _Task = task["_fleet"]
            self._begin(known, task)
            try:
                send(task)
            finally:
                known.ended = True

        def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            self.records[request.request_id.removeprefix(self.prefix)].is_preempted = True
            preempt(request, *args, **kwargs)

        queue.append, adapter._send_single_request = watched_append, watched_send
        self.scheduler._preempt_request = watched_preempt

    def _stream_of(self, task: Any) -> str:
        external = task["request"].external_req_id if "request" in task else task["cleanup_shm"][0].rsplit("_", 1)[0]
        return str(external.removeprefix(self.prefix))

    def _begin(self, known: _Task, task: Any) -> None:
        words = f"{known.stream}: task {known.number}{'' if known.content else ' (a clean-up)'}"
        if known.began:
            self.defects.append(f"{words} was sent twice")
        if known.number < self._last_sent.get(known.stream, 0):
            self.defects.append(f"{words} after {self._last_sent[known.stream]}")
        if known.content is not None and known.content != digest(task.get("multimodal_output")):
            self.defects.append(f"{words} has another payload now: {str(task.get('multimodal_output'))[:200]}")
        known.began, self._last_sent[known.stream] = True, known.number

    # ---- The stage ----

    def execute(self, scheduled: Any) -> Step:
        """Start a step; the output is there at once."""
        output = self.fleet_runner.step(scheduled)
        step = Step(scheduled, lambda: output)
        self.in_flight.appendleft(step)
        return step

    def update(self) -> Any:
        """Take the oldest step's output."""
        from vllm_omni.utils.mm_outputs import partition_flat_payload

        outputs = super().update()
        for output in [each for batch in (outputs or {}).values() for each in batch.outputs]:
            record = self.records[output.request_id.removeprefix(self.prefix)]
            record.tokens += output.new_token_ids
            record.ended += [str(output.finish_reason)] if output.finish_reason is not None else []
            record.prefills += output.prefill_stats is not None
            payload = getattr(output, "multimodal_output", None)
            client = partition_flat_payload(payload)[1] if isinstance(payload, Mapping) else None
            record.visible += [digest(client)] if client else []
        return outputs

    # ---- The script ----

    def _give(self, stream: Stream, segment: Segment | None, number: int, *, resumable: bool) -> None:
        """Give the scheduler a request, or a further segment of a session; None ends the session."""
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request
        from vllm_omni.engine.serialization import serialize_additional_information

        prompt, tokens = (1, 1) if segment is None else (segment.prompt, segment.tokens)
        made = engine_request(
            self.prefix + stream.name,
            [1 + number_of(stream.name, number, place) % 1000 for place in range(prompt)],
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            resumable=resumable,
        )
        made.lora_request = LoRARequest(f"lora{stream.lora}", stream.lora, "/nowhere") if stream.lora else None
        request = Request.from_engine_core_request(made, None)
        request.external_req_id, request.payload_sender_info = made.external_req_id, None
        if stream.text_only and not number:
            request.additional_information = serialize_additional_information({"omni_final_stage_id": 0})
        self.scheduler.add_request(request)

    def _arrive(self, stream: Stream, turn: int) -> None:
        self._arrived[stream.name] = turn
        self._updates[stream.name] = [*stream.segments, None] if stream.segments else []
        self._give(stream, Segment(stream.prompt, stream.tokens), 0, resumable=bool(stream.segments))
        while stream.is_upfront and self._updates[stream.name]:
            self._update(stream)

    def _update(self, stream: Stream) -> None:
        segment = self._updates[stream.name].pop(0)
        number = 1 + len(stream.segments) - len(self._updates[stream.name])
        self._give(stream, segment, number, resumable=segment is not None)

    def _events(self, turn: int) -> None:
        from vllm.v1.request import RequestStatus

        for name, stream in self.streams.items():
            if name not in self._arrived and turn >= stream.arrives:
                self._arrive(stream, turn)
            since = turn - self._arrived.get(name, turn)
            self._feed_chunks(stream, since)
            request = self.scheduler.requests.get(self.prefix + name)
            if request is None or request.is_finished():
                continue
            is_parked = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            # Upstream drops what waits of a session that is ended while it is parked: not before all is sent.
            left = self._updates[name]
            if is_parked and left and (left[0] is not None or not self._unsent(name)):
                self._update(stream)
            if stream.abort_turn is not None and since >= stream.abort_turn:
                self.records[name].fate = "aborted"
                self.abort(self.prefix + name)

    def _unsent(self, name: str = "") -> list[_Task]:
        return [each for each in list(self._tasks) if not each.ended and name in ("", each.stream)]

    def _feed_chunks(self, stream: Stream, since: int) -> None:
        """Send what the stage before would have sent by now."""
        from vllm_omni.data_entry_keys import EmbeddingsStruct, MetaStruct, OmniPayloadStruct

        name, before, stage = stream.name, self.fleet.stage - 1, self.fleet.stage
        while before == 0 and name in self._arrived and (number := self._fed[name]) < stream.feed_chunks:
            if since < number * stream.feed_gap:
                return
            rows = {"prefill": torch.zeros(stream.prompt, 8)} if number == 0 else {"decode": torch.zeros(1, 8)}
            finished = torch.tensor(number == stream.feed_chunks - 1)
            chunk = OmniPayloadStruct(embed=EmbeddingsStruct(**rows), meta=MetaStruct(finished=finished))
            key = f"{self.prefix}{name}_{before}_{number}"
            assert self.outside.put(str(before), str(stage), key, chunk)[0], f"the input {key} could not be sent"
            self._fed[name] += 1

    def _fetch(self, turn: int | None) -> None:
        """What receivers take in this turn; None: all that is there."""
        stage = self.fleet.stage
        for name in self._arrived:
            stream, record = self.streams[name], self.records[name]
            is_time = turn is None or (stream.fetches and turn % stream.fetches == 0)
            while is_time and not stream.text_only and record.fate != "aborted" and name not in self._has_all:
                found = self.outside.get(str(stage), str(stage + 1), f"{self.prefix}{name}_{stage}_{record.received}")
                if found is None:
                    break
                record.received += 1
                if found[0]["meta"]["finished"]:
                    self._has_all.add(name)

    def drive(self) -> None:
        """Go through the script to its end."""
        began, turn, idle = time.monotonic(), 0, 0
        try:
            while not self._is_done():
                self.gate.turn = turn
                self.clock.now += self.fleet.step_s
                self._events(turn)
                executed = self.step()
                idle = 0 if executed else idle + 1
                # A receiver that looks at nothing before looks when all that is left waits for it.
                self._fetch(None if idle >= IDLE_TURNS else turn)
                if not executed:
                    time.sleep(0.0002)
                elif turn % 16 == 0:
                    time.sleep(0)
                turn += 1
                if turn > MOST_TURNS or time.monotonic() - began > MOST_S:
                    requests = {each: str(request.status) for each, request in self.scheduler.requests.items()}
                    self.defects.append(f"hangs: requests {requests}, tasks {self._unsent()[:12]}")
                    break
        except Exception as error:  # what a stage must not do
            where = traceback.format_exc(limit=-4)
            self.defects.append(f"engine step {turn} raised {type(error).__name__}: {error}\n{where}")

    def _is_done(self) -> bool:
        has_updates = any(
            left and self.prefix + name in self.scheduler.requests for name, left in self._updates.items()
        )
        return len(self._arrived) == len(self.streams) and not (self.busy() or self._unsent() or has_updates)

    def finish(self) -> None:
        """Look at what is left, and end the stage."""
        self._fetch(None)
        self.gate.opened = True
        if not self.adapter.save_thread.is_alive():
            self.defects.append("the save thread has ended")
        self.defects += [f"runner: {each}" for each in self.fleet_runner.misread]
        self.defects += [f"the connector refused {key}" for key in self.gate.refused]
        for name, record in self.records.items():
            external = self.prefix + name
            record.puts = list(self.gate.puts[name])
            if record.fate != "aborted" and record.ended[-1:] == ["error"]:
                record.fate = "failed"
            kept = ("_sender_tokens", "put_req_chunk", "request_payload", "code_prompt_token_ids")
            record.left = {each for each in kept if external in getattr(self.adapter, each)}
            chunks = getattr(self.connector, "chunks", None)
            names = [path.name for path in shared_memory(external)] if chunks is None else list(chunks)
            if any(each.startswith(f"{external}_{self.fleet.stage}_") for each in names):
                record.left.add("connector")
        if not self.defects:
            self._look_at_counts()
        self.close()
        self.outside.close()
        deadline = time.monotonic() + 5.0
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.defects.append(f"the thread {thread.name} still runs after the end")

    def _look_at_counts(self) -> None:
        """Whether the patch's own counts are back at nothing, where its queue stands."""
        queue = self.adapter._pending_save_reqs
        deadline = time.monotonic() + 5.0
        while hasattr(queue, "tasks") and (queue.tasks or len(queue) or (queue.nbytes and not queue.is_aside)):
            self.clock.now += 100.0  # chunks that nobody fetches count for a minute
            if time.monotonic() > deadline:
                self.defects.append(f"the queue counts {queue.tasks} tasks ({len(queue)} wait), {queue.nbytes} bytes")
                return
            time.sleep(0.001)
