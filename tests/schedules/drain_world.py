"""The real orchestrator on a clock of its own, to which anything may happen at any time.

Real are the orchestrator with its admission, forwards, aborts, evictions and detaches, the pools, the output processors
and vLLM's dequeue. Only the engine behind a client is a fake. Everything that happens has a method here, with plain
arguments, so that the same can happen in another world.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
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

from benchmarks.rigs.engine_requests import engine_request
from benchmarks.rigs.inprocess import Pipeline, Replica, Stage, audio, batch, codes, silent, text
from tests.patches import content
from tests.schedules.virtual_time import VirtualLoop

Entry = tuple[str, str, int, str]
"""Of a raw output: request, what is in it, a number unlike any other, and how it ends (``""``, ``stop``, ...)."""


@dataclass(frozen=True)
class Shape:
    """What a world is made of.

    Attributes:
        stages: The stages.
        async_chunk: As the deploy YAML's key.
        coordinated: Requests are bound to addresses, as where a coordinator attaches and detaches replicas.
        gated: What the talker says is not sent to the orchestrator, as with ``forward_gate``.
    """

    stages: tuple[Stage, ...]
    async_chunk: bool
    coordinated: bool
    gated: bool


@dataclass(eq=False)
class Note:
    """An entry of a raw output that was sent, or the statistics of one (of no request)."""

    request: str
    stage: int
    engine: Engine
    ends: bool = False
    error: bool = False
    number: int = 0


@dataclass
class Got:
    """What one request got.

    Attributes:
        stages: What the messages of each stage say, without errors and what an abort gives back.
        errors: Its errors, and whether each is of a death.
        ends: How many messages said that they are the last.
        last_is_end: Its very last message said so.
        engines: Of each stage the replicas that had it.
        lost: It may have got less than was sent: it was aborted, or what waited of it was lost with a replica.
    """

    stages: dict[int | None, list[Any]] = field(default_factory=lambda: defaultdict(list))
    errors: list[Any] = field(default_factory=list)
    ends: int = 0
    last_is_end: bool = False
    engines: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    lost: bool = False

    def add(self, found: Any) -> None:
        """A message, read when it is sent: upstream's may grow afterwards (token ids under CUMULATIVE)."""
        kind, *said = content.message(found)
        error = kind == "ErrorMessage"
        self.last_is_end = error or bool(getattr(found, "finished", False))
        self.ends += self.last_is_end
        outputs = getattr(getattr(found, "engine_outputs", None), "outputs", None) or []
        if error:
            self.errors.append((found.fatal, found.stage_id, *said))
            self.lost |= "no live replica" in found.error  # it came too late for those that have died
        elif not any(each.finish_reason == "abort" for each in outputs):
            no_replica = [{**each, "replica_id": None} if isinstance(each, dict) else each for each in said[1:]]
            self.stages[found.stage_id].append((kind, *no_replica))


class Engine(Replica):
    """A replica, whose name is the same in every world."""

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

        vars(self.outputs_queue)["_get"] = taken  # each of the queue's ways to read goes through it

    def __repr__(self) -> str:
        return self.name

    @property
    def works(self) -> bool:
        """Whether it sends: it has not died, and was not shut down."""
        return not (self.down or self.resources.engine_dead)

    async def add_request_async(self, request: Any, **_kwargs: Any) -> None:
        """Begin to work.

        Raises:
            EngineDeadError: It died, as the real client's.
        """
        if self.resources.engine_dead:
            self.world.refused(self, request.request_id)
            raise EngineDeadError
        await super().add_request_async(request)
        self.world.got[request.request_id].engines[self.stage_id].add(self.name)
        self.world.work[self.stage_id, request.request_id].append((self, bool(request.resumable)))
        await asyncio.sleep(0)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """What is in flight comes still: one raw output."""
        await super().abort_requests_async(request_ids)
        for name in request_ids:
            self.world.work[self.stage_id, name] = deque([(self, False)])
            self.world.stopping.add((self.stage_id, name))

    def process_engine_inputs(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """The next stage's input."""
        return [{"prompt_token_ids": [1, 2, 3]}]


class World:
    """One orchestrator; nothing happens in it but in ``advance``, ``attach`` and ``detach``.

    Args:
        shape: What it is made of.
        event_driven: The orchestrator's mode.
        on_sleep: Called before its event loop sleeps.

    Attributes:
        work: Of each stage and request, the replica that has it, for each of its segments, and whether more will come.
        got: What each request got.
        wrong: What was seen that must not be.
    """

    def __init__(self, shape: Shape, *, event_driven: bool, on_sleep: Callable[[], None] = lambda: None) -> None:
        self.shape = shape
        self.loop = VirtualLoop(on_sleep)
        self.engines: list[list[Engine]] = [[] for _ in shape.stages]
        self.work: dict[tuple[int, str], deque[tuple[Engine, bool]]] = defaultdict(deque)
        self.stopping: set[tuple[int, str]] = set()
        self.params: dict[str, list[Any]] = {}
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
        """Let upstream's round robin go on at the replica that a request would choose in any world."""
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
        """A request was given to a replica that has died: upstream evicts it at once, and what waits of it is lost."""
        if engine.heard and not any(each.request_id == name for each in engine.submitted):
            self.wrong.append(f"{name}: given to {engine.name} after its death was heard")
        pool = self.pipeline.pools[engine.stage_id]
        last = pool.live_replica_ids() in ([], [engine.replica_id])
        for each in self.asked:
            self.got[each].lost |= each == name or last or pool.get_bound_replica_id(each) == engine.replica_id

    # ---- What happens ----

    def submit(self, name: str, kind: str, asked: tuple[int, ...], *, more: bool = False) -> None:
        """A request, or with ``more`` the first segment of a session."""
        self.asked[name] = asked
        self.params[name] = [
            SamplingParams(output_kind=RequestOutputKind[kind], detokenize=False, max_tokens=100_000)
            for _ in self.shape.stages
        ]
        self._say(name, "add_request", more=more)

    def update(self, name: str, *, more: bool) -> None:
        """The next segment of a session."""
        self._say(name, "streaming_update", more=more)

    def _say(self, name: str, what: Any, *, more: bool) -> None:
        self.pipeline.requests.sync_q.put_nowait(
            StageSubmissionMessage(
                type=what,
                request_id=name,
                prompt=engine_request(name, [1, 2, 3], self.params[name][0], resumable=more),
                original_prompt={},
                output_prompt_text=None,
                sampling_params_list=self.params[name],
                final_stage_id=max(self.asked[name]),
                final_output_stage_ids=list(self.asked[name]),
                preprocess_ms=0.0,
                request_timestamp=0.0,
                enqueue_ts=0.0,
            )
        )

    def abort(self, name: str, *, waits: bool) -> None:
        """The user leaves; or waits for the answer."""
        self.got[name].lost = True
        message = AbortRequestMessage(request_ids=[name], rpc_id=name if waits else None)
        self.pipeline.requests.sync_q.put_nowait(message)

    def send(self, stage: int, entries: Sequence[Entry], *, stats: bool = False) -> None:
        """A raw output of each replica that has these requests."""
        sent: dict[Engine, list[tuple[Any, Note]]] = defaultdict(list)
        for name, kind, value, finish in entries:
            queue = self.work[stage, name]
            if not queue or not queue[0][0].works:
                continue
            engine, resumable = queue[0]
            segment = finish not in ("", "error") and resumable
            note = Note(name, stage, engine, bool(finish) and not segment, finish == "error")
            sent[engine].append((self._entry(name, kind, value, finish, segment=segment), note))
            if finish == "error" or (stage, name) in self.stopping:
                queue.clear()
            elif finish:
                queue.popleft()
        for engine, pairs in sent.items():
            raw = batch(*(entry for entry, _ in pairs), stats=SchedulerStats() if stats else None)
            self.came(raw, [*(note for _, note in pairs), *([Note("", stage, engine)] if stats else [])])
            engine.outputs_queue.put_nowait(raw)

    def came(self, raw: Any, notes: list[Note]) -> None:
        """A raw output is there to be read: an entry each, and its statistics."""

    def _entry(self, name: str, kind: str, value: int, finish: str, *, segment: bool) -> Any:
        reason = FinishReason[finish.upper()] if finish else None
        more: dict[str, Any] = {"is_segment_finished": segment}
        if finish == "error":
            more["stop_reason"] = f"{name} broke at {value}"
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
        """A replica sends nothing any more but the news."""
        engine = self.engines[stage][which]
        engine.resources.engine_dead = True
        engine.outputs_queue.put_nowait(EngineDeadError())

    def attach(self, stage: int, in_place_of: int | None = None) -> None:
        """A replica comes, into a slot of its own or that of one that has died."""
        engines = self.engines[stage]
        slot = len(engines) if in_place_of is None else engines[in_place_of].replica_id
        engine = Engine(self, stage)
        address = engine.client_addresses["input_address"]
        engine.replica_id = self.pipeline.pools[stage].add_client(address, engine, replica_id=slot)

    def detach(self, stage: int, which: int) -> None:
        """The coordinator takes a replica away, as upstream does."""
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
        """Time goes by."""
        self.loop.go_on(seconds)
        if self.task.done():
            raise AssertionError(f"the orchestrator ended: {self.task.exception()!r}")

    # ---- What is left ----

    def left(self) -> set[tuple[str, str]]:
        """Where something of a request is still kept, and of which."""
        kept = {"requests": self.orchestrator.request_states}
        for pool in self.pipeline.pools:
            for owner in (pool, pool.output_processor):
                maps = {f"{key} of stage {pool.stage_id}": value for key, value in vars(owner).items()}
                kept |= {key: value for key, value in maps.items() if isinstance(value, dict)}
        return {(key, name) for key, value in kept.items() for name in value if name in self.asked}

    def answers(self) -> list[Any]:
        """What was answered to those who waited; what it gives back is theirs too."""
        found = []
        while not self.pipeline.rpc.sync_q.empty():
            found.append(self.pipeline.rpc.sync_q.get_nowait())
            for each in getattr(found[-1], "abort_outputs", None) or ():
                self.got[each.request_id].add(each)
        return found

    def close(self) -> None:
        """Shut the orchestrator down, whatever state it is in."""
        with suppress(Exception):
            self.pipeline.requests.sync_q.put_nowait(ShutdownRequestMessage())
            self.loop.go_on(1.0)
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with suppress(Exception):
            self.loop.go_on(1.0)
        self.loop.close()
