"""One arm of a fleet: upstream's stage, driven through the script, with everything written down."""

from __future__ import annotations

import functools
import os
import pickle
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from benchmarks.save_queue.rig import Rig, Step
from tests.fleets.stage_parts import Clock, Gate, Put, Runner, connector_of, digest, number_of
from tests.fleets.stage_script import BLOCK, CFG_SUFFIX, MAX_MODEL_LEN, Fleet, Segment, Stream

MOST_TURNS = 40_000
MOST_S = 40.0
IDLE_TURNS = 200
"""Turns without a step after which nothing comes of itself any more: longer than arrivals and hung sends last."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)
POISON = -77


@dataclass
class Result:
    """What an arm gave.

    Attributes:
        puts: By stream.
        tokens: By stream.
        ended: By stream: finish reasons of its outputs.
        visible: By stream: what of its payloads clients may see, as digests.
        prefills: By stream: outputs with prefill statistics.
        fates: By stream: "completed", "aborted", "failed" (upstream ended it with an error) or "never arrived".
        preempted: Streams that were.
        left: Streams of which something lies in the connector at the end.
        state: By stream: what upstream's adapter keeps of it at the end.
        received: Chunks that the receiver got, by stream.
        defects: What must not happen.
        notes: What happened besides.
        counters: Of the patch.
        fault: What was injected.
        turns: It took.
        seconds: It took.
    """

    puts: dict[str, list[Put]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    visible: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    prefills: Counter[str] = field(default_factory=Counter)
    fates: dict[str, str] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    state: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    received: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    fault: str | None = None
    turns: int = 0
    seconds: float = 0.0


@dataclass
class _Task:
    number: int
    stream: str
    words: str
    content: str | None
    tensors: list[torch.Tensor]
    began: bool = False
    ended: bool = False


class _Deque(deque[Any]):
    """Upstream's queue, with its `append` told."""

    told: Any = None

    def append(self, task: Any) -> None:
        self.told(task)
        super().append(task)


class _Config:
    """A pickled config, changed for a fleet; read as a file is."""

    def __init__(self, path: Path, fleet: Fleet) -> None:
        self._path, self._fleet = path, fleet

    def read_bytes(self) -> bytes:
        """The changed config."""
        from vllm.config.lora import LoRAConfig
        from vllm.config.speculative import SpeculativeConfig

        fleet = self._fleet
        config = pickle.loads(self._path.read_bytes())  # noqa: S301 - our own file
        config.model_config.max_model_len = MAX_MODEL_LEN
        config.cache_config.block_size = BLOCK
        config.cache_config.enable_prefix_caching = False
        scheduling = config.scheduler_config
        scheduling.max_model_len = MAX_MODEL_LEN
        scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = fleet.max_batched
        scheduling.policy = fleet.policy
        if fleet.max_loras:
            config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=fleet.max_loras)
        if fleet.processor == "plain":
            config.model_config.custom_process_next_stage_input_func = "tests.fleets.stage_parts.plain_processor"
        scheduling.async_scheduling = fleet.scheduler == "async"
        name = {
            "sync": "omni_ar_scheduler.OmniARScheduler",
            "async": "omni_ar_scheduler.OmniARAsyncScheduler",
            "cfg": "omni_cfg_ar_scheduler.OmniCFGARScheduler",
        }[fleet.scheduler]
        scheduling.scheduler_cls = f"vllm_omni.core.sched.{name}"
        if fleet.spec:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=fleet.spec,
                prompt_lookup_max=2,
                prompt_lookup_min=1,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        if fleet.scheduler == "cfg":
            scheduling.enable_chunked_prefill = False
            config.additional_config = {"cfg_prefill_delay_tokens": number_of(fleet.seed, "delay") % 3}
        return pickle.dumps(config)


class Arm(Rig):
    """A stage that goes through a fleet's script.

    Args:
        config: As `stage_configs` wrote it.
        fleet: The script.
        prefix: Of every id in this arm; shared memory is everybody's.
        clock: What the patch's modules see.
        is_patched: Whether the patch is installed.
    """

    def __init__(self, config: Path, fleet: Fleet, prefix: str, clock: Clock | None, *, is_patched: bool) -> None:
        from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
            OmniChunkTransferAdapter,
        )

        self.fleet, self.prefix, self.clock, self.is_patched = fleet, prefix, clock, is_patched
        self.result = Result()
        connector = connector_of(fleet.connector, fleet.stage)
        self._threads = set(threading.enumerate())
        with mock.patch.object(OmniChunkTransferAdapter, "create_connector", return_value=connector):
            super().__init__(
                cast(Path, _Config(config, fleet)),
                max_num_seqs=fleet.max_num_seqs,
                kv_cache_mib=fleet.kv_mib,
                device_type=fleet.device,
            )
        layer = int(self.vllm_config.model_config.hf_config.talker_config.accept_hidden_layer)
        self.fleet_runner = Runner(
            fleet.stage, fleet.width, (0, layer), views=fleet.views, spec=fleet.spec, prefix=prefix
        )
        self.by_external: dict[str, Stream] = {}
        self.gate = Gate(self.connector, prefix, self.by_external)
        store = getattr(self.connector, "store", None)
        self.receiver = self.connector if store else connector_of(fleet.connector, fleet.stage + 1)
        self.feeder = connector_of(fleet.connector, fleet.stage - 1, store)
        self.arrived: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._updates: dict[str, list[Segment | None]] = {}
        self._fed: Counter[str] = Counter()
        self._next: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._tasks: dict[int, _Task] = {}
        self._numbers: Counter[str] = Counter()
        self._last_sent: dict[str, int] = {}
        self._lock = threading.Lock()
        self._queue: Any = None
        self._sending_failures: list[str] = []
        self.poisons = fleet.poison and is_patched
        self.spared: Callable[[], AbstractContextManager[None]] = nullcontext
        self._watch()

    # ---- What is written down ----

    def _watch(self) -> None:
        adapter = self.adapter
        send, record = adapter._send_single_request, adapter.record_send_failure
        self._watch_queue()

        def watched_send(task: Any) -> None:
            known = self._begin_send(task)
            try:
                send(task)
            finally:
                self._end_send(known)

        def watched_record(request_id: str | None, reason: str) -> None:
            self._sending_failures.append(f"{request_id}: {reason}")
            record(request_id, reason)

        send_for_generation = adapter._send_single_request_for_generation

        def watched_send_for_generation(task: Any, *args: Any, **kwargs: Any) -> Any:
            self._compare(task)
            return send_for_generation(task, *args, **kwargs)

        adapter._send_single_request_for_generation = watched_send_for_generation
        process = adapter.custom_process_next_stage_input_func

        @functools.wraps(process)
        def watched_process(*args: Any, **kwargs: Any) -> Any:
            try:
                return process(*args, **kwargs)
            except Exception as error:
                self.result.defects.append(f"the input processor raised {error!r}")
                raise

        adapter.custom_process_next_stage_input_func = watched_process
        adapter._send_single_request, adapter.record_send_failure = watched_send, watched_record
        preempt = self.scheduler._preempt_request

        def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            self.result.preempted.add(request.request_id.removeprefix(self.prefix))
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = watched_preempt

    def _watch_queue(self) -> None:
        """Be told what is queued, in whichever queue the adapter has now."""
        queue = self.adapter._pending_save_reqs
        if queue is self._queue:
            return
        if type(queue) is deque:
            with self.adapter._sender_state_lock:  # nobody appends meanwhile
                told = _Deque(queue)
                told.told = self._queued
                self.adapter._pending_save_reqs = told
            self._queue = told
            return
        append = queue.append

        def told_append(task: Any) -> None:
            self._queued(task)
            append(task)

        queue.append = told_append
        self._queue = queue

    def _queued(self, task: Any) -> None:
        stream, words = self._name(task)
        content, tensors = (None, []) if "cleanup_shm" in task else self._look_at(task)
        with self._lock:
            number = self._numbers[stream] = self._numbers[stream] + 1
            self._tasks[id(task)] = _Task(number, stream, words, content, tensors)
            task["_fleet"] = self._tasks[id(task)]

    def _name(self, task: Any) -> tuple[str, str]:
        if "cleanup_shm" in task:
            prefix, count = task["cleanup_shm"]
            return prefix.rsplit("_", 1)[0].removeprefix(self.prefix), f"clean-up of {count}"
        request = task["request"]
        words = f"step at {request.num_computed_tokens}{', last' if task['is_finished'] else ''}"
        return request.external_req_id.removeprefix(self.prefix), words

    def _look_at(self, task: Any) -> tuple[str, list[torch.Tensor]]:
        payload = task["multimodal_output"]
        tensors = [
            value
            for key, value in (payload or {}).items()
            if key.startswith(("hidden_states.", "codes.")) and isinstance(value, torch.Tensor)
        ]
        return digest(payload), tensors

    def _begin_send(self, task: Any) -> _Task:
        stream, words = self._name(task)
        with self._lock:
            known = task.get("_fleet")
            if known is None:
                known = _Task(self._numbers[stream], stream, words, None, [])
                self.result.notes.append(f"a task of {stream} ({words}) was not seen when it was queued")
            if known.began:
                self.result.defects.append(f"{stream}: task {known.number} ({words}) was sent twice")
            if known.number < self._last_sent.get(stream, 0):
                self.result.defects.append(f"{stream}: task {known.number} after {self._last_sent[stream]}")
            self._last_sent[stream] = known.number
            known.began = True
        return cast(_Task, known)

    def _compare(self, task: Any) -> None:
        """Whether what the input processor gets is what was queued."""
        known = task.get("_fleet")
        if known is None or known.content is None or known.content == digest(task["multimodal_output"]):
            return
        with self._lock:
            self.result.defects.append(
                f"{known.stream}: the payload of task {known.number} ({known.words}) is another one now: "
                f"{str(task['multimodal_output'])[:200]}"
            )

    def _end_send(self, known: _Task) -> None:
        with self._lock:
            known.ended = True

    # ---- The stage ----

    def execute(self, scheduled: Any) -> Step:
        """Start a step; the output is there at once."""
        if self.poisons:
            self._write_over()
        output = self.fleet_runner.step(scheduled)
        self.result.defects += [f"runner: {each}" for each in self.fleet_runner.misread]
        self.fleet_runner.misread.clear()
        step = Step(scheduled, lambda: output)
        self.in_flight.appendleft(step)
        return step

    def _write_over(self) -> None:
        """Write over what was given out and waits, while the only lane is known to stand in a put."""
        if not self.gate.is_stuck():
            return
        with self._lock:
            waiting = [task for task in self._tasks.values() if not task.began]
        for task in waiting:
            for tensor in task.tensors:
                tensor.fill_(POISON)
            task.tensors = []

    def update(self) -> Any:
        """Take the oldest step's output."""
        outputs = super().update()
        if self.fleet.spec and self.fleet.scheduler == "sync":
            names, drafts = self.fleet_runner.drafts
            self.scheduler.update_draft_token_ids(SimpleNamespace(req_ids=names, draft_token_ids=drafts))
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                self._take(output)
        return outputs

    def _take(self, output: Any) -> None:
        from vllm_omni.utils.mm_outputs import partition_flat_payload

        name, result = output.request_id.removeprefix(self.prefix), self.result
        result.tokens[name] += list(output.new_token_ids)
        if output.finish_reason is not None:
            result.ended[name].append(str(output.finish_reason))
        result.prefills[name] += output.prefill_stats is not None
        payload = getattr(output, "multimodal_output", None)
        if isinstance(payload, Mapping):
            client = partition_flat_payload(payload)[1]
            if client:
                result.visible[name].append(digest(client))

    # ---- The script ----

    def _request(
        self, stream: Stream, prompt: int, tokens: int, number: int, *, resumable: bool, first: bool = True
    ) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request
        from vllm_omni.engine import OmniEngineCoreRequest
        from vllm_omni.engine.serialization import serialize_additional_information

        info: dict[str, Any] = {}
        if stream.text_only:
            info["omni_final_stage_id"] = 0
        if stream.role != "plain":
            info["cfg_group"] = {"role": stream.role, "uncond_suffix": CFG_SUFFIX}
        external = self.prefix + stream.external
        request = Request.from_engine_core_request(
            OmniEngineCoreRequest(
                request_id=self.prefix + stream.name,
                external_req_id=external,
                prompt_token_ids=[1 + number_of(stream.name, number, place) % 1000 for place in range(prompt)],
                mm_features=None,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
                pooling_params=None,
                arrival_time=1000.0 + stream.arrives,
                lora_request=LoRARequest(f"lora{stream.lora}", stream.lora, "/nowhere") if stream.lora else None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=stream.priority,
                resumable=resumable,
            ),
            None,
        )
        request.external_req_id, request.payload_sender_info = external, None
        if info and first:
            request.additional_information = serialize_additional_information(info)
        return request

    def _arrive(self, turn: int) -> None:
        for stream in self.fleet.streams:
            if stream.name in self.arrived or turn < stream.arrives:
                continue
            before = self.by_external.get(stream.external)
            if before is not None and not self._is_free(before):
                continue
            self.by_external[stream.external] = stream
            self.arrived[stream.name] = turn
            self.external_ids.add(self.prefix + stream.external)
            self._next[stream.external] = 0
            if before is not None and self.fleet.connector == "memory":  # which has no clean-up
                chunks = self.connector.store.chunks
                for key in [each for each in list(chunks) if each.startswith(f"{self.prefix}{stream.external}_")]:
                    del chunks[key]
            resumable = bool(stream.segments)
            self.scheduler.add_request(self._request(stream, stream.prompt, stream.tokens, 0, resumable=resumable))
            if resumable:
                self._updates[stream.name] = [*stream.segments, None]
                while stream.updates == "upfront" and self._updates[stream.name]:
                    self._update_session(stream)

    def _is_free(self, before: Stream) -> bool:
        """Whether a stream's external id can be used again."""
        external = self.prefix + before.external
        if self.prefix + before.name in self.scheduler.requests or external in self.adapter._sender_tokens:
            return False
        if before.name in self._aborted:  # a last chunk that went out all the same keeps its name in shared memory
            return not any(put.finished for put in self.gate.puts[before.name])
        return before.name in self._ended

    def _unsent(self, external: str, kind: str = "") -> bool:
        with self._lock:
            return any(
                task.stream == external and not task.ended and task.words.startswith(kind)
                for task in self._tasks.values()
            )

    def _update_session(self, stream: Stream) -> None:
        segment = self._updates[stream.name].pop(0)
        number = len(stream.segments) - len(self._updates[stream.name])
        last = segment is None
        prompt, tokens = (1, 1) if segment is None else (segment.prompt, segment.tokens)
        self.scheduler.add_request(self._request(stream, prompt, tokens, 1 + number, resumable=not last, first=False))

    def _events(self, turn: int) -> None:
        from vllm.v1.request import RequestStatus

        self._arrive(turn)
        for name, at in list(self.arrived.items()):
            stream = next(each for each in self.fleet.streams if each.name == name)
            self._feed_chunks(stream, turn - at)
            request = self.scheduler.requests.get(self.prefix + name)
            if request is None or request.is_finished():
                continue
            is_parked = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
            # Upstream drops what waits of a session that is ended while it is parked: not before all is sent.
            left = self._updates.get(name)
            if is_parked and left and (left[0] is not None or not self._unsent(stream.external)):
                self._update_session(stream)
            due = stream.abort_turn is not None and turn - at >= stream.abort_turn
            if due or (stream.abort_tokens is not None and len(self.result.tokens[name]) >= stream.abort_tokens):
                self._aborted.add(name)
                if stream.role == "cond":  # upstream ends both of a pair
                    self._aborted.add(stream.name + CFG_SUFFIX)
                self.abort(self.prefix + name)

    def _feed_chunks(self, stream: Stream, since: int) -> None:
        """Send what the stage before would have sent by now."""
        from vllm_omni.data_entry_keys import EmbeddingsStruct, MetaStruct, OmniPayloadStruct

        stage = self.fleet.stage
        while stage == 1 and (number := self._fed[stream.name]) < stream.feed_chunks:
            if since < number * stream.feed_gap:
                return
            rows = {"prefill": torch.zeros(stream.prompt, 8)} if number == 0 else {"decode": torch.zeros(1, 8)}
            chunk = OmniPayloadStruct(
                embed=EmbeddingsStruct(**rows),
                meta=MetaStruct(finished=torch.tensor(number == stream.feed_chunks - 1)),
            )
            key = f"{self.prefix}{stream.external}_{stage - 1}_{number}"
            sent, _, _ = self.feeder.put(str(stage - 1), str(stage), key, chunk)
            assert sent, f"the input {key} could not be sent"
            self._fed[stream.name] += 1

    def _fetch(self, turn: int | None) -> None:
        """What receivers take in this turn; None: all that is there."""
        stage = self.fleet.stage
        for external, stream in self.by_external.items():
            if stream.text_only or stream.name in self._aborted or stream.name in self._ended:
                continue
            # Before upstream has cleaned up after an aborted stream, the next of that name would be given its chunks.
            if self._unsent(external, "clean-up"):
                continue
            if turn is not None and (not stream.fetches or turn % stream.fetches):
                continue
            while True:
                key = f"{self.prefix}{external}_{stage}_{self._next[external]}"
                found = self.receiver.get(str(stage), str(stage + 1), key)
                if found is None:
                    break
                self._next[external] += 1
                self.result.received[stream.name] += 1
                if bool(found[0]["meta"]["finished"]):
                    self._ended.add(stream.name)
                    break

    def drive(self) -> Result:
        """Go through the script to its end."""
        result, began, turn, idle = self.result, time.monotonic(), 0, 0
        # A hold that does not expire while we wait ends with a fetch, and only that way: the very end, for a receiver
        # that looks at nothing before, is when all that is left waits for it.
        is_for_ever = self.fleet.options.get("max_hold_s", 0.0) > MOST_S
        try:
            while True:
                self.gate.turn = turn
                if self.clock is not None:
                    self.clock.tick()
                self._events(turn)
                self._watch_queue()
                executed = self.step()
                idle = 0 if executed else idle + 1
                self._fetch(None if is_for_ever and idle >= IDLE_TURNS else turn)
                if not executed:
                    if self._is_done():
                        break
                    time.sleep(0.0002)
                elif turn % 16 == 0:
                    time.sleep(0)
                turn += 1
                if turn > MOST_TURNS or time.monotonic() - began > MOST_S:
                    result.defects.append(f"hangs: {self._what_is_left()}")
                    break
        except Exception as error:  # what a stage must not do
            where = traceback.format_exc(limit=-4)
            result.defects.append(f"engine step {turn} raised {type(error).__name__}: {error}\n{where}")
        result.turns, result.seconds = turn, time.monotonic() - began
        self._finish()
        return result

    def _is_done(self) -> bool:
        if self.busy() or any(not task.ended for task in list(self._tasks.values())):
            return False
        if any(left and self.prefix + name in self.scheduler.requests for name, left in self._updates.items()):
            return False
        waiting = [each for each in self.fleet.streams if each.name not in self.arrived]
        self._fetch(None)
        # One whose external id cannot be used again, because of a terminal chunk that was never sent, never comes.
        return all(
            (before := self.by_external.get(each.external)) is not None and not self._is_free(before)
            for each in waiting
        )

    def _what_is_left(self) -> str:
        requests = {each.removeprefix(self.prefix): str(r.status) for each, r in self.scheduler.requests.items()}
        tasks = [
            f"{t.stream}/{t.number}{' (being sent)' if t.began else ''}" for t in self._tasks.values() if not t.ended
        ]
        return f"requests {requests}, running {len(self.scheduler.running)}, tasks {tasks[:12]} of {len(tasks)}"

    def _finish(self) -> None:
        result, adapter = self.result, self.adapter
        self._fetch(None)
        self.gate.opened = True
        result.puts = dict(self.gate.puts)
        for stream in self.fleet.streams:
            name = stream.name
            if name not in self.arrived:
                result.fates[name] = "never arrived"
            elif name in self._aborted:
                result.fates[name] = "aborted"
            else:
                result.fates[name] = "failed" if result.ended[name][-1:] == ["error"] else "completed"
            if stream.external in self.by_external and self.by_external[stream.external] is stream:
                external = self.prefix + stream.external
                if self._lies_somewhere(external):
                    result.left.add(name)
                for attribute in ("_sender_tokens", "put_req_chunk", "request_payload", "code_prompt_token_ids"):
                    if external in getattr(adapter, attribute):
                        result.state[name].add(attribute)
        if not adapter.save_thread.is_alive():
            result.defects.append("the save thread has ended")
        lost = [f"{t.stream}/{t.number} ({t.words})" for t in self._tasks.values() if not t.ended]
        if lost and not any("hangs" in each or "raised" in each for each in result.defects):
            result.defects.append(f"not sent: {lost}")
        with self.spared():
            self._look_at_counts()
        self.close()
        self._join()

    def _look_at_counts(self) -> None:
        """Whether the patch's own counts are back at nothing."""
        queue, result = self._queue, self.result
        if not self.is_patched or result.defects or not hasattr(queue, "tasks"):
            return
        deadline = time.monotonic() + 5.0
        while queue.tasks or len(queue):  # a send ends for us a moment before it does for the queue
            if time.monotonic() > deadline:
                result.defects.append(f"the queue counts {queue.tasks} tasks ({len(queue)} waiting) of none")
                return
            time.sleep(0.001)
        if self.fleet.connector != "shared" and queue.nbytes:
            result.defects.append(f"the queue counts {queue.nbytes} bytes of none")

    def _lies_somewhere(self, external: str) -> bool:
        stage = self.fleet.stage
        store = getattr(self.connector, "store", None)
        if store is not None:
            return any(key.startswith(f"{external}_{stage}_") for key in list(store.chunks))
        return any(path.name.startswith(f"{external}_{stage}_") for path in SHARED_MEMORY.iterdir())

    def _join(self) -> None:
        deadline = time.monotonic() + 5.0
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.result.defects.append(f"the thread {thread.name} still runs after the end")
        for path in SHARED_MEMORY.iterdir():
            if path.name.removeprefix("shm_").startswith(self.prefix):
                path.unlink(missing_ok=True)


def prefix_of(number: int) -> str:
    """An arm's own prefix of ids."""
    return f"fl{os.getpid()}x{number}-"
