"""The real orchestrator on a virtual clock, with methods for each event that can occur.

The orchestrator with its admission, forwards, aborts, evictions and detaches, the pools, the output processors and
vLLM's dequeue are real. Only the engine behind a client is a fake. Each event is a method with plain arguments, so that
the same events can be repeated in another world.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats
from vllm_omni.engine.membership_controller import MembershipController
from vllm_omni.engine.messages import AbortRequestMessage, ShutdownRequestMessage, StageSubmissionMessage

from benchmarks.rigs.inprocess import Pipeline, Replica, Stage, audio, batch, codes, engine_request, silent, text
from tests.patches import content
from tests.schedules.virtual_time import VirtualLoop

Entry = tuple[str, str, int, str]
"""An entry of a raw output: request, kind of content, a unique number, and finish reason (``""``, ``stop``, ...)."""


@dataclass(frozen=True)
class Shape:
    """The configuration of a world.

    Attributes:
        stages: The stages.
        async_chunk: The key of the deploy YAML.
        coordinated: Requests are bound to addresses, as with a coordinator that attaches and detaches replicas.
        gated: The talker's payload is not sent to the orchestrator, as with ``forward_gate``.
    """

    stages: tuple[Stage, ...]
    async_chunk: bool = True
    coordinated: bool = False
    gated: bool = False


@dataclass(eq=False)
class Note:
    """An entry of a raw output that was sent, or the statistics of a raw output, which have no request."""

    request: str
    stage: int
    engine: Engine
    ends: bool = False
    error: bool = False
    number: int = 0


@dataclass
class Got:
    """The messages that one request received.

    Attributes:
        stages: The content of each stage's messages, without errors and outputs that an abort returns.
        errors: Its errors, each with whether it is fatal.
        ends: Number of messages that are marked as the last one.
        last_is_end: Whether its last message is marked so.
        engines: The replicas of each stage that processed it.
        lost: It may have received less than was sent, because it was aborted or a replica was lost with queued outputs.
    """

    stages: dict[int | None, list[Any]] = field(default_factory=lambda: defaultdict(list))
    errors: list[Any] = field(default_factory=list)
    ends: int = 0
    last_is_end: bool = False
    engines: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    lost: bool = False

    def add(self, found: Any) -> None:
        """Record a message when it is sent, because upstream may extend it later (token ids under CUMULATIVE)."""
        kind, *said = content.message(found)
        error = kind == "ErrorMessage"
        self.last_is_end = error or bool(getattr(found, "finished", False))
        self.ends += self.last_is_end
        outputs = getattr(getattr(found, "engine_outputs", None), "outputs", None) or []
        if error:
            self.errors.append((found.fatal, found.stage_id, *said))
            self.lost |= "no live replica" in found.error  # every replica of a stage had died
        elif not any(each.finish_reason == "abort" for each in outputs):
            no_replica = [{**each, "replica_id": None} if isinstance(each, dict) else each for each in said[1:]]
            self.stages[found.stage_id].append((kind, *no_replica))


class Engine(Replica):
    """A replica with the same name in every world."""

    requires_multimodal_data = False

    def __init__(self, world: World, stage_id: int) -> None:
        super().__init__(stage_id, world.shape.stages[stage_id], -1)
        self.world = world
        self.name = f"{stage_id}.{len(world.engines[stage_id])}"
        self.client_addresses = {"input_address": f"tcp://{self.name}"}
        self.heard = False
        world.engines[stage_id].append(self)
        take = self.outputs_queue._get

        def taken() -> Any:
            item = take()
            self.heard |= isinstance(item, EngineDeadError)
            return item

        vars(self.outputs_queue)["_get"] = taken  # every read of the queue calls it

    def __repr__(self) -> str:
        return self.name

    @property
    def works(self) -> bool:
        """Whether it sends outputs, because it has neither died nor been shut down."""
        return not (self.down or self.resources.engine_dead)

    async def add_request_async(self, request: Any, **_kwargs: Any) -> None:
        """Start to process a request.

        Raises:
            EngineDeadError: The replica has died, as with the real client.
        """
        if self.resources.engine_dead:
            self.world.refused(self, request.request_id)
            raise EngineDeadError
        await super().add_request_async(request)
        self.world.got[request.request_id].engines[self.stage_id].add(self.name)
        self.world.work[self.stage_id, request.request_id] = self
        await asyncio.sleep(0)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort the requests. One raw output that is in flight is still sent."""
        await super().abort_requests_async(request_ids)
        for name in request_ids:
            self.world.work[self.stage_id, name] = self
            self.world.stopping.add((self.stage_id, name))

    def process_engine_inputs(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """Return the next stage's input."""
        return [{"prompt_token_ids": [1, 2, 3]}]


class World:
    """One orchestrator. Its event loop runs only in ``advance`` and ``detach``, and at the end in ``close``.

    Args:
        shape: Its configuration.
        event_driven: The orchestrator's mode.
        on_sleep: Called before its event loop sleeps.

    Attributes:
        work: For each stage and request, the replica that makes its outputs.
        got: What each request received.
        wrong: Violations that were observed.
    """

    def __init__(self, shape: Shape, *, event_driven: bool, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.shape = shape
        self.loop = VirtualLoop(on_sleep)
        self.engines: list[list[Engine]] = [[] for _ in shape.stages]
        self.work: dict[tuple[int, str], Engine] = {}
        self.stopping: set[tuple[int, str]] = set()
        self.asked: dict[str, tuple[int, ...]] = {}
        self.got: dict[str, Got] = defaultdict(Got)
        self.wrong: list[str] = []
        self.pipeline = Pipeline(shape.stages, async_chunk=shape.async_chunk, event_driven=event_driven)
        self.orchestrator = self.pipeline.orchestrator
        put = self.pipeline.outputs._put

        def say(found: Any) -> None:
            self.got[found.request_id].add(found)
            put(found)

        vars(self.pipeline.outputs)["_put"] = say
        for pool, stage in zip(self.pipeline.pools, shape.stages, strict=True):
            model = SimpleNamespace(max_model_len=1_000_000, model_stage="", async_chunk=shape.async_chunk)
            pool._stage_vllm_config = SimpleNamespace(model_config=model)
            pool.clients.clear()
            pool._replica_metrics.clear()
            self._select_by_name(pool)
            for _ in range(stage.replicas):
                self.attach(pool.stage_id)
        self.task = self.loop.create_task(self.orchestrator.run())
        self.advance(2e-5)

    def _select_by_name(self, pool: Any) -> None:
        """Set upstream's round robin so that a request gets the same replica in every world."""
        select = pool.select_replica_id

        def selected(request_id: str, **kwargs: Any) -> int:
            names = [f"{pool.clients[each].name} {request_id}" for each in pool.available_replica_ids()]
            pool._next_replica_id = max(range(len(names)), key=lambda n: crc32(names[n].encode()), default=0)
            chosen: int = select(request_id, **kwargs)
            if self.shape.coordinated and pool._request_bindings.pop(request_id, None) is not None:
                pool.bind(request_id, pool.clients[chosen].client_addresses["input_address"])
            return chosen

        pool.select_replica_id = selected

    def refused(self, engine: Engine, name: str) -> None:
        """Note a request for a dead replica, which upstream evicts at once, so that its queued outputs are lost."""
        if engine.heard and not any(each.request_id == name for each in engine.submitted):
            self.wrong.append(f"{name}: sent to {engine.name} after its death was read")
        pool = self.pipeline.pools[engine.stage_id]
        last = pool.live_replica_ids() in ([], [engine.replica_id])
        for each in self.asked:
            self.got[each].lost |= each == name or last or pool.get_bound_replica_id(each) == engine.replica_id

    # ---- What happens ----

    def submit(self, name: str, kind: str, asked: tuple[int, ...], segment: str = "") -> None:
        """Submit a request, or the "first" or "last" segment of a session."""
        self.asked[name] = asked
        params = SamplingParams(output_kind=RequestOutputKind[kind], detokenize=False, max_tokens=100_000)
        message = StageSubmissionMessage(
            type="streaming_update" if segment == "last" else "add_request",
            request_id=name,
            prompt=engine_request(name, [1, 2, 3], params, resumable=segment == "first"),
            original_prompt={},
            output_prompt_text=None,
            sampling_params_list=[params, *(params.clone() for _ in self.shape.stages[1:])],
            final_stage_id=max(asked),
            final_output_stage_ids=list(asked),
            **dict.fromkeys(("preprocess_ms", "request_timestamp", "enqueue_ts"), 0.0),
        )
        self.pipeline.requests.sync_q.put_nowait(message)

    def abort(self, name: str, *, waits: bool) -> None:
        """Abort a request. The user waits for the result or disconnects."""
        self.got[name].lost = True
        message = AbortRequestMessage(request_ids=[name], rpc_id=name if waits else None)
        self.pipeline.requests.sync_q.put_nowait(message)

    def send(self, stage: int, entries: Sequence[Entry], *, stats: bool = False) -> None:
        """Send a raw output of each replica that processes these requests."""
        sent: dict[Engine, list[tuple[Any, Note]]] = defaultdict(list)
        for name, kind, value, finish in entries:
            engine = self.work.get((stage, name))
            if engine is None or not engine.works:
                continue
            note = Note(name, stage, engine, bool(finish), finish == "error")
            sent[engine].append((self._entry(name, kind, value, finish), note))
            if finish or (stage, name) in self.stopping:
                del self.work[stage, name]
        for engine, pairs in sent.items():
            raw = batch(*(entry for entry, _ in pairs), stats=SchedulerStats() if stats else None)
            self.came(raw, [*(note for _, note in pairs), *([Note("", stage, engine)] if stats else [])])
            engine.outputs_queue.put_nowait(raw)

    def came(self, raw: Any, notes: list[Note]) -> None:
        """Called before a raw output is queued, with a note for each entry and for its statistics."""

    def _entry(self, name: str, kind: str, value: int, finish: str) -> Any:
        reason = FinishReason[finish.upper()] if finish else None
        more = {"stop_reason": f"{name} broke at {value}"} if finish == "error" else {}
        if kind == "kv":
            return text(name, finish=reason, kv_transfer_params={"kv_ready": True}, **more)
        if kind == "text" or (kind == "codes" and self.shape.gated):
            return text(name, value, finish=reason, **more)
        if kind == "codes":
            return codes(name, reason, **more)
        if kind == "silent":
            return silent(name, finish_reason=reason, **more)
        return audio(name, value, finish=reason, **more)

    def die(self, stage: int, which: int) -> None:
        """Let a replica die. It queues an ``EngineDeadError`` and sends nothing after it."""
        engine = self.engines[stage][which]
        engine.resources.engine_dead = True
        engine.outputs_queue.put_nowait(EngineDeadError())

    def attach(self, stage: int, in_place_of: int | None = None) -> None:
        """Attach a replica in a new slot, or in the slot of a dead one."""
        engines = self.engines[stage]
        slot = len(engines) if in_place_of is None else engines[in_place_of].replica_id
        engine = Engine(self, stage)
        address = engine.client_addresses["input_address"]
        engine.replica_id = self.pipeline.pools[stage].add_client(address, engine, replica_id=slot)

    def detach(self, stage: int, which: int) -> None:
        """Detach a replica with upstream's controller."""
        address = self.engines[stage][which].client_addresses["input_address"]
        pool = self.pipeline.pools[stage]
        for name in [*self.asked]:
            self.got[name].lost |= pool._affinity.get(name) == address
        controller = object.__new__(MembershipController)
        vars(controller).update(
            _stage_pools=self.pipeline.pools,
            _remote_replica_keys_by_input_addr={},
            _output_queue=self.orchestrator.output_async_queue,
            _cleanup_callback=lambda ids: self.orchestrator._cleanup_request_ids(ids, abort=True),
            _replica_removed_callback=self.orchestrator._remove_stage_replica_waiting,
        )
        detaching = self.loop.create_task(controller.handle_unregister(stage, address))
        while not detaching.done():
            self.advance(2e-5)
        detaching.result()

    def advance(self, seconds: float) -> None:
        """Run the event loop for *seconds* of its clock."""
        self.loop.go_on(seconds)
        if self.task.done():
            raise AssertionError(f"the orchestrator ended: {self.task.exception()!r}")

    # ---- What is left ----

    def left(self) -> set[tuple[str, str]]:
        """The maps that still have an entry of a request, each with the request."""
        kept = {"requests": self.orchestrator.request_states}
        for pool in self.pipeline.pools:
            for owner in (pool, pool.output_processor):
                maps = {f"{key} of stage {pool.stage_id}": value for key, value in vars(owner).items()}
                kept |= {key: value for key, value in maps.items() if isinstance(value, dict)}
        return {(key, name) for key, value in kept.items() for name in value if name in self.asked}

    def answers(self) -> list[Any]:
        """The results of aborts that users wait for, whose returned outputs are recorded."""
        found = []
        while not self.pipeline.rpc.sync_q.empty():
            found.append(self.pipeline.rpc.sync_q.get_nowait())
            for each in getattr(found[-1], "abort_outputs", None) or ():
                self.got[each.request_id].add(each)
        return found

    def close(self) -> None:
        """Shut the orchestrator down in any state."""
        with suppress(Exception):
            self.pipeline.requests.sync_q.put_nowait(ShutdownRequestMessage())
            self.loop.go_on(1.0)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with suppress(Exception):
            self.loop.go_on(1.0)
        self.loop.close()
