"""Playing a fleet on the real orchestrator: what its replicas send, what goes wrong, and a log of all of it.

Real are the orchestrator with its admission, forwards, aborts and evictions, the pools, the output processors and
vLLM's dequeue. Ours is what stands behind a client: it sends what the fleet says, counted from when the orchestrator
submitted the request to it, so that nothing comes before its cause.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.engine.messages import AbortRequestMessage, ShutdownRequestMessage, StageSubmissionMessage

from benchmarks.rigs.engine_requests import engine_request
from benchmarks.rigs.inprocess import Pipeline, Replica, Stage, audio, batch, codes, silent, text
from omni_fastpath.hooks import HOOKS, BacklogView, hookimpl
from omni_fastpath.patches.budgeted_drain.drain import DrainLoop
from tests.fleets import virtual_time
from tests.fleets.dispatch_script import Attach, Death, Fast, Fleet, Request, Step
from tests.fleets.report import quiet
from tests.patches import content

_QUIET_S = 0.02
"""Nothing has happened for so long: all is done. Longer than processing one raw output ever takes."""

_PATIENCE_S = 5.0
"""A fleet that is not done so long after its last event never will be."""

_FINISH = {"": None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "error": FinishReason.ERROR}


@dataclass(frozen=True)
class Arm:
    """One way to run a fleet."""

    name: str
    event_driven: bool
    fast: Fast | None = None


@dataclass(frozen=True)
class Note:
    """An entry of a raw output that was sent.

    Attributes:
        uid: Which; the same in every arm.
        request: Whose.
        stage: Which stage sent it.
        replica: Name of the replica that sent it.
        ends: It ends the request at this stage.
        error: It is an error.
    """

    uid: tuple[Any, ...]
    request: str
    stage: int
    replica: str
    ends: bool
    error: bool


@dataclass(frozen=True)
class Said:
    """A message to the front end, as it was when it was sent: upstream's may grow afterwards (CUMULATIVE token ids).

    Attributes:
        request: Whose.
        stage: Of which stage.
        ends: It says that it is the request's last, or is an error.
        kind: ``error``, ``abort`` (what an abort gives back) or ``output``.
        text: What it says, as plain data without times; which replica made it is another question.
    """

    request: str
    stage: int | None
    ends: bool
    kind: str
    text: tuple[Any, ...]

    @classmethod
    def of(cls, found: Any) -> Said:
        """What a message says."""
        error = type(found).__name__ == "ErrorMessage"
        outputs = getattr(getattr(found, "engine_outputs", None), "outputs", None) or []
        aborted = any(getattr(each, "finish_reason", None) == "abort" for each in outputs)
        return cls(
            found.request_id,
            found.stage_id,
            error or bool(getattr(found, "finished", False)),
            "error" if error else "abort" if aborted else "output",
            _say(found),
        )


def _say(found: Any) -> tuple[Any, ...]:
    kind, *rest = content.message(found)
    said = rest if kind == "ErrorMessage" else rest[1:]
    return (
        kind,
        *({k: v for k, v in each.items() if k != "replica_id"} if isinstance(each, dict) else each for each in said),
    )


@dataclass
class Outcome:
    """What became of a fleet on one arm.

    Attributes:
        arm: The arm.
        log: What happened, in order: ``(what, when, ...)``.
        messages: What the front end got, in order.
        rpc: What was answered to those who waited.
        left: What is still kept of requests when all is done: where, and of which.
        crash: What ended the orchestrator, or None.
        stuck: Why it never came to an end, or None.
        facts: What else an arm says about itself.
    """

    arm: Arm
    log: list[tuple[Any, ...]] = field(default_factory=list)
    messages: list[Said] = field(default_factory=list)
    rpc: list[Any] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    crash: BaseException | None = None
    stuck: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Everything that happened."""
        found = [f"---- {self.arm.name}: {self.arm.fast}; {self.facts}"]
        found += [f"{(when - 1000) * 1000:9.3f} {what:9} {more}" for what, when, *more in self.log]
        return found + [f"{each.request} {each.stage} {each.kind} {each.ends} {each.text}" for each in self.messages]


class Engine(Replica):
    """A replica of an LLM stage."""

    requires_multimodal_data = False

    def __init__(self, world: World, stage_id: int, stage: Stage, replica_id: int, name: str) -> None:
        super().__init__(stage_id, stage, replica_id)
        self.world, self.name = world, name
        self.due: dict[float, list[tuple[Note, Any]]] = defaultdict(list)
        self.busy_until: dict[str, float] = {}
        self.segments: dict[str, int] = defaultdict(int)
        self.deaf_after: dict[str, float] = {}
        take = self.outputs_queue._get

        def taken() -> Any:
            item = take()
            if isinstance(item, EngineDeadError):
                self.world.note("heard", self.stage_id, self.name)
            else:
                self._tell_front()
            return item

        vars(self.outputs_queue)["_get"] = taken  # each of the queue's ways to read goes through it

    @property
    def dead(self) -> bool:
        """Whether it died."""
        return bool(self.resources.engine_dead)

    async def add_request_async(self, request: Any, **_kwargs: Any) -> None:
        """Begin to send what the fleet says.

        Raises:
            EngineDeadError: It died, as the real client's.
        """
        if self.dead:
            self.world.note("refused", request.request_id, self.stage_id, self.name)
            raise EngineDeadError
        self.world.submitted(self, request.request_id, resumable=bool(request.resumable))
        await asyncio.sleep(0)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop sending, after what is in flight."""
        await super().abort_requests_async(request_ids)
        for name in request_ids:
            lag = self.world.requests[name].in_flight_s if name in self.world.requests else 0.0
            self.deaf_after[name] = self.world.loop.now + lag

    def process_engine_inputs(self, *_args: Any, **_kwargs: Any) -> list[Any]:
        """The next stage's input."""
        return [{"prompt_token_ids": [1, 2, 3]}]

    def die(self) -> None:
        """Send nothing any more but the news."""
        self.resources.engine_dead = True
        self.due.clear()
        self.outputs_queue.put_nowait(EngineDeadError())
        self._tell_front()

    def _tell_front(self) -> None:
        """Note that nothing stands before the news of its death any more."""
        if self.dead and self.outputs_queue.qsize() == 1:
            self.world.note("in front", self.stage_id, self.name)

    def waits(self) -> bool:
        """Whether something is still to be read."""
        return not self.outputs_queue.empty()


class World:
    """One fleet on one arm, in the middle of it."""

    def __init__(self, fleet: Fleet, arm: Arm, loop: virtual_time.VirtualLoop) -> None:
        self.fleet, self.arm, self.loop = fleet, arm, loop
        self.outcome = Outcome(arm)
        self.requests = {request.name: request for request in fleet.requests}
        self.pending = 0
        self.told_to_stop = False
        self.last_event = loop.now
        self._began = loop.now
        self._notes: dict[int, tuple[Any, Note]] = {}
        self._ticks: dict[float, set[Engine]] = {}
        self._answers: list[Note] = []
        self._params = {
            request.name: [
                SamplingParams(output_kind=RequestOutputKind[request.output_kind], detokenize=False, max_tokens=100_000)
                for _ in fleet.stages
            ]
            for request in fleet.requests
        }
        made = [
            Stage(seen, modality, replicas)
            for (seen, modality), replicas in zip(fleet.stages, fleet.replicas, strict=True)
        ]
        self.pipeline = Pipeline(made, async_chunk=fleet.async_chunk, event_driven=arm.event_driven)
        self.orchestrator = self.pipeline.orchestrator
        put = self.pipeline.outputs._put

        def say(message: Any) -> None:
            self.outcome.messages.append(Said.of(message))
            put(message)

        vars(self.pipeline.outputs)["_put"] = say
        self.engines: list[list[Engine]] = [[] for _ in made]
        for stage_id, pool in enumerate(self.pipeline.pools):
            model = SimpleNamespace(max_model_len=1_000_000, model_stage="", async_chunk=fleet.async_chunk)
            pool._stage_vllm_config = SimpleNamespace(model_config=model)
            for replica_id in range(len(pool.clients)):
                pool.clients[replica_id] = self._engine(stage_id, replica_id)
        self._listen()

    def _engine(self, stage_id: int, replica_id: int) -> Engine:
        name = f"{stage_id}.{len(self.engines[stage_id])}"
        seen, modality = self.fleet.stages[stage_id]
        engine = Engine(self, stage_id, Stage(seen, modality), replica_id, name)
        self.engines[stage_id].append(engine)
        return engine

    # ---- The log ----

    def note(self, what: str, *more: Any) -> None:
        """Something happened."""
        self.last_event = self.loop.now
        self.outcome.log.append((what, self.loop.now, *more))

    def came(self, entry: Any, note: Note) -> None:
        """An entry is there to be read."""
        self._notes[id(entry)] = entry, note  # the entry is kept, so that its id stays its own
        self.note("came", note)

    def _listen(self) -> None:
        """Note what the orchestrator does, at its own methods, and let processing take its time."""
        orchestrator = self.orchestrator
        process, handle = orchestrator._process_llm_stage_outputs, orchestrator._handle_processed_outputs
        bury, clean = orchestrator._handle_dead_replica, orchestrator._cleanup_request_ids
        dispatch = orchestrator._dispatch_or_fail_request
        dispatching: list[str] = []

        async def processing(stage_id: int, replica_id: int, raw: Any, ids: set[str]) -> Any:
            notes = [(self._notes[id(entry)][1], entry) for entry in raw.outputs if id(entry) in self._notes]
            self.note("went", [note for note, _ in notes])
            if stage_id == 0:
                self._answers += [note for note, entry in notes if entry.is_segment_finished]
            self.loop.spend(self.fleet.cost_s[stage_id])
            return await process(stage_id, replica_id, raw, ids)

        async def handling(stage_id: int, replica_id: int, outputs: list[Any]) -> None:
            await handle(stage_id, replica_id, outputs)
            self._answered()

        async def burying(stage_id: int, replica_id: int, error: Any) -> None:
            client = self.pipeline.pools[stage_id].clients[replica_id]
            self.note("buried", stage_id, getattr(client, "name", "nobody"), bool(dispatching))
            await bury(stage_id, replica_id, error)

        async def cleaning(request_ids: list[str], **kwargs: Any) -> Any:
            for name in request_ids:
                if name in orchestrator.request_states:
                    self.note("ended", name)
            return await clean(request_ids, **kwargs)

        async def dispatches(*args: Any, **kwargs: Any) -> Any:
            dispatching.append("")
            try:
                return await dispatch(*args, **kwargs)
            finally:
                dispatching.pop()

        orchestrator._process_llm_stage_outputs = processing
        orchestrator._handle_processed_outputs = handling
        orchestrator._handle_dead_replica = burying
        orchestrator._cleanup_request_ids = cleaning
        orchestrator._dispatch_or_fail_request = dispatches

    # ---- What replicas send ----

    def submitted(self, engine: Engine, name: str, *, resumable: bool) -> None:
        """A request came to a replica: plan what it sends."""
        self.note("submitted", name, engine.stage_id, engine.name)
        engine.deaf_after.pop(name, None)
        request = self.requests[name]
        segment = engine.segments[name]
        engine.segments[name] += 1
        steps: tuple[Step, ...] = ()
        if segment < len(request.segments):
            steps = request.segments[segment][engine.stage_id]
        if not steps:  # a session's terminal update brings nothing to compute
            kind = steps_kind(self.fleet.stages[engine.stage_id][1])
            steps = (Step(0.0, kind, 900_000 + segment, "stop"),)
        begin = max(self.loop.now, engine.busy_until.get(name, 0.0))
        due = begin
        for step in steps:
            due = max(due, begin + step.at)
            tick = (int(due / self.fleet.tick_s) + 1) * self.fleet.tick_s
            if tick not in self._ticks:
                self._ticks[tick] = set()
                self.loop.call_at(tick, self._tick, tick)
                self.pending += 1
            self._ticks[tick].add(engine)
            segment_end = bool(step.finish) and resumable and step.finish != "error"
            ends = bool(step.finish) and not segment_end
            uid = (name, engine.stage_id, segment, step.value, step.kind, step.finish)
            note = Note(uid, name, engine.stage_id, engine.name, ends, step.finish == "error")
            engine.due[tick].append((note, _entry(name, step, segment_end=segment_end)))
            engine.busy_until[name] = due

    def _tick(self, tick: float) -> None:
        self.pending -= 1
        for engine in sorted(self._ticks.pop(tick), key=lambda engine: (engine.stage_id, engine.name)):
            self._send(engine, tick)

    def _send(self, engine: Engine, tick: float) -> None:
        # A step of an engine sends one entry of a request at most: what else is due of it goes with the next.
        steps: list[list[tuple[Note, Any]]] = []
        places: dict[str, int] = defaultdict(int)
        for note, entry in engine.due.pop(tick, []):
            if engine.dead or engine.deaf_after.get(note.request, 1e12) < self.loop.now:
                continue
            place = places[note.request]
            places[note.request] += 1
            if place == len(steps):
                steps.append([])
            steps[place].append((note, entry))
        for step in steps:
            for note, entry in step:
                self.came(entry, note)
            engine.outputs_queue.put_nowait(batch(*(entry for _, entry in step)))

    def _answered(self) -> None:
        """A session's user says more, some time after the first stage's answer was routed."""
        for note in self._answers:
            request = self.requests[note.request]
            segment = note.uid[2] + 1
            if segment < len(request.segments):
                self.pending += 1
                self.loop.call_later(request.pauses[segment - 1], self._submit, request, segment)
        self._answers.clear()

    # ---- What happens to the fleet ----

    def plan(self) -> None:
        """Set a timer for each event of the script."""
        for request in self.fleet.requests:
            self._at(request.at, self._submit, request, 0)
            if request.abort_at is not None:
                self._at(request.abort_at, self._abort, request)
        for death in self.fleet.deaths:
            self._at(death.at, self._die, death)
        for attach in self.fleet.attaches:
            self._at(attach.at, self._attach, attach)
        self.loop.call_later(_QUIET_S, self._watch)

    def _at(self, at: float, act: Any, *args: Any) -> None:
        self.pending += 1
        self.loop.call_at(self._began + at, act, *args)

    def _submit(self, request: Request, segment: int) -> None:
        self.pending -= 1
        more = segment + 1 < len(request.segments)
        params = self._params[request.name]
        prompt = engine_request(request.name, [1, 2, 3], params[0], resumable=more)
        self.note("asked", request.name, segment)
        self.pipeline.requests.sync_q.put_nowait(
            StageSubmissionMessage(
                type="streaming_update" if segment else "add_request",
                request_id=request.name,
                prompt=prompt,
                original_prompt={},
                output_prompt_text=None,
                sampling_params_list=params,
                final_stage_id=max(request.final_output_stages),
                final_output_stage_ids=list(request.final_output_stages),
                preprocess_ms=0.0,
                request_timestamp=0.0,
                enqueue_ts=0.0,
            )
        )

    def _abort(self, request: Request) -> None:
        self.pending -= 1
        self.note("aborts", request.name)
        rpc_id = request.name if request.abort_rpc else None
        message = AbortRequestMessage(request_ids=[request.name], rpc_id=rpc_id)
        self.pipeline.requests.sync_q.put_nowait(message)

    def _die(self, death: Death) -> None:
        self.pending -= 1
        engines = self.engines[death.stage]
        engine = engines[death.which % len(engines)]
        if not engine.dead:
            self.note("died", death.stage, engine.name)
            engine.die()

    def _attach(self, attach: Attach) -> None:
        self.pending -= 1
        pool = self.pipeline.pools[attach.stage]
        engine = self._engine(attach.stage, -1)
        replica_id = pool.add_client(f"tcp://{engine.name}", engine)
        engine.replica_id = replica_id
        self.note("attached", attach.stage, engine.name)

    def _watch(self) -> None:
        """Look whether all is done."""
        live = [client for pool in self.pipeline.pools for client in pool.clients if client is not None]
        quiet = (
            not self.pending and not any(client.waits() for client in live) and self.pipeline.requests.sync_q.empty()
        )
        now = self.loop.now
        if not quiet and now - self.last_event > _PATIENCE_S:
            self.outcome.stuck = f"{self.pending} events to come, {[each.name for each in live if each.waits()]} wait"
        elif not (quiet and now - self.last_event >= _QUIET_S):
            self.loop.call_later(_QUIET_S / 2, self._watch)
            return
        self.outcome.left = left_of_requests(self)
        self.told_to_stop = True
        self.pipeline.requests.sync_q.put_nowait(ShutdownRequestMessage())


def steps_kind(modality: str) -> Any:
    """What a stage of a modality sends."""
    return {"text": "text", "latent": "codes"}.get(modality, "silent")


def _entry(name: str, step: Step, *, segment_end: bool) -> OmniEngineCoreOutput:
    finish = _FINISH[step.finish]
    more: dict[str, Any] = {"is_segment_finished": segment_end}
    if step.finish == "error":
        more["stop_reason"] = f"{name} broke at {step.value}"
    if step.kind == "kv":
        return text(name, kv_transfer_params={"kv_ready": True}, **more)
    if step.kind == "text":
        return text(name, step.value, finish=finish, **more)
    if step.kind == "codes":
        return codes(name, finish, **more)
    if step.kind == "silent":
        return silent(name, finish_reason=finish, **more)
    return audio(name, float(step.value), finish=finish, **more)


# ---- What is left ----


def left_of_requests(world: World) -> dict[str, list[str]]:
    """What still has an entry of a request: upstream's maps and ours."""
    names = set(world.requests)
    found: dict[str, set[str]] = {"request_states": set(world.orchestrator.request_states) & names}
    for pool in world.pipeline.pools:
        processor = pool.output_processor
        maps: dict[str, Any] = {
            "bindings": pool._request_bindings,
            "affinity": pool._affinity,
            "timestamps": pool._output_timestamps_by_request,
            "first_timestamps": pool._non_empty_first_output_timestamps_by_request,
            "frames": pool._audio_frames_by_request,
            "rates": pool._audio_sample_rate_by_request,
            "processor": processor.request_states,
            "external": processor.external_req_ids,
            "native": processor._native_text_metrics_by_request,
        }
        for key, value in maps.items():
            found[f"{key} of stage {pool.stage_id}"] = set(value) & names
    found["ours"] = _ours(names, world.orchestrator.request_states)
    return {key: sorted(value) for key, value in found.items() if value}


def _ours(names: set[str], upstreams: Any) -> set[str]:
    """Request ids anywhere in what our loop keeps: its own objects, plain containers and closures in them."""
    kinds = (list, tuple, set, frozenset, deque, partial, CellType, MethodType)
    stack: list[Any] = [DrainLoop.running]
    seen, found = {id(upstreams)}, set[str]()
    while stack:
        thing = stack.pop()
        if isinstance(thing, str):
            found |= {thing} & names
        elif id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, FunctionType):
                stack += thing.__closure__ or ()
            elif isinstance(thing, dict):  # whose keys the collector does not visit where all are strings
                stack += [*thing, *thing.values()]
            elif isinstance(thing, kinds) or type(thing).__module__.startswith("omni_fastpath"):
                stack += gc.get_referents(thing)
    return found


# ---- Playing ----


class Chooser:
    """A plugin that chooses any stage, one without a backlog or none.

    Args:
        seed: Of what it chooses.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    @hookimpl
    def next_stage(self, view: BacklogView) -> int | None:
        """Whatever it is."""
        return self._random.choice([*view.waiting, None, 0])


def play(fleet: Fleet, arm: Arm) -> Outcome:
    """Play a fleet on an arm. Of our arms the default set is installed already, of stock's it is not."""
    from tests.patches.drive import options

    loop = virtual_time.VirtualLoop()
    world = World(fleet, arm, loop)
    outcome = world.outcome
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if arm.fast is not None:
            stack.enter_context(options(**arm.fast.options))
            if arm.fast.chooser is not None:
                chooser = Chooser(arm.fast.chooser)
                HOOKS.register(chooser)
                stack.callback(HOOKS.unregister, chooser)
        stack.enter_context(virtual_time.on(loop))
        _run(world, loop)
    while not world.pipeline.rpc.sync_q.empty():
        answer = world.pipeline.rpc.sync_q.get_nowait()
        outcome.rpc.append(answer)
        outcome.messages += [Said.of(each) for each in getattr(answer, "abort_outputs", None) or ()]
    return outcome


def _run(world: World, loop: virtual_time.VirtualLoop) -> None:
    outcome = world.outcome
    asyncio.set_event_loop(None)
    loop.set_exception_handler(lambda _loop, _context: None)
    world.plan()
    try:
        loop.run_until_complete(_orchestrate(world))
    except virtual_time.StuckError as error:
        outcome.stuck = str(error)
    except BaseException as error:  # a plugin's SystemExit, for one, comes out here
        outcome.crash = error
    finally:
        _close(loop)


async def _orchestrate(world: World) -> None:
    loop = world.loop
    loop.call_later(0.0, lambda: world.outcome.facts.update(ours=len(DrainLoop.running)))
    await world.orchestrator.run()
    if not world.told_to_stop:
        world.outcome.stuck = "the orchestrator ended by itself"


def _close(loop: virtual_time.VirtualLoop) -> None:
    """Cancel what is left, whatever state the loop was left in."""
    loop.turns = 0
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in tasks:
        task.cancel()
    for _ in range(3):
        try:
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            break
        except BaseException:  # noqa: S112 - another of the same
            continue
    loop.close()
    gc.collect(0)
