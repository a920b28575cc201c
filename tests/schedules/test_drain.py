"""The drain under random schedules, against a plain model and against stock.

Hypothesis lets anything happen to a real orchestrator with the drain, an exception at any of its lines too, at any time
of a virtual clock. A plain model, a queue of arrivals for each request and replica, says what may be dispatched and
when nothing may be queued. Afterwards the same happens to stock with enough time after each event, so that a request
receives what it should receive.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm_omni")

from benchmarks.rigs.inprocess import QWEN3_OMNI, Stage
from omni_fastpath import install
from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.budgeted_drain import DrainOptions
from omni_fastpath.patches.budgeted_drain.drain import Drain as TheDrain
from omni_fastpath.patches.budgeted_drain.replicas import QueuedReplica
from tests.patches.drive import before_processing, silent, switched_on
from tests.patches.lines import FailsAt, lines_of, traced
from tests.schedules.drain_world import Engine, Got, Note, Shape, World

pytestmark = pytest.mark.upstream

TEXT, HIDDEN, AUDIO = QWEN3_OMNI
PIPELINES = {
    "omni": (QWEN3_OMNI, True),
    "omni, whole": (QWEN3_OMNI, False),
    "tts": ((HIDDEN, AUDIO), True),
    "all seen": ((TEXT, TEXT, AUDIO), True),
}
"""Stages, and whether the next one gets chunks or waits for the whole."""
KINDS = {"text": ("text",), "latent": ("codes",), "audio": ("audio", "silent")}
COUNTS: Counter[str] = Counter()
LINES = lines_of("budgeted_drain")


@contextmanager
def stock() -> Iterator[None]:
    """Upstream's own objects in all slots of the patches."""
    written = [each for slots in install._installed.values() for each in slots]
    for slot, raw, _ in reversed(written):
        slot.write(raw)
    try:
        yield
    finally:
        for slot, _, ours in written:
            slot.write(ours)


class Judged(World):
    """A world whose orchestrator takes its time, and is watched by a plain model.

    Args:
        shape: What it is made of.
        event_driven: The orchestrator's mode.
        cost_s: What processing a raw output of each stage takes.

    Attributes:
        broken: Raises an exception in the drain while anything happens; None for none.
        was_early: Whether the last raw output went before its place in the line.
    """

    broken: FailsAt | None = None

    def __init__(self, shape: Shape, *, event_driven: bool, cost_s: tuple[float, ...]) -> None:
        self.lines: dict[tuple[Engine, str], deque[Note]] = defaultdict(deque)
        self.notes: dict[int, tuple[Any, Note]] = {}
        self.cost_s, self.was_early = cost_s, False
        super().__init__(shape, event_driven=event_driven, on_sleep=self._sleeps)
        before_processing(self.pipeline, self._processes)

    @property
    def has_failed(self) -> bool:
        """Whether upstream's loop has taken over, or is about to."""
        return LEDGER.named("budgeted_drain").has_failed

    def armed(self) -> Any:
        """An exception in the drain may be raised inside."""
        if self.broken is None or self.broken.at is not None:
            return nullcontext()
        return traced("budgeted_drain", self.broken)

    def advance(self, seconds: float) -> None:
        """Time goes by."""
        with self.armed():
            super().advance(seconds)

    def came(self, raw: Any, notes: list[Note]) -> None:
        """It is queued after what arrived earlier."""
        for thing, note in zip(_things(raw), notes, strict=True):
            self.notes[id(thing)] = thing, note  # the thing is kept, so that its id stays its own
            note.number = len(self.notes)
            self.lines[note.engine, note.request].append(note)

    def waiting(self) -> list[Note]:
        """What came and was not dispatched, but what was lost with a replica."""
        return [note for (engine, _), line in self.lines.items() if not engine.down for note in line]

    def _processes(self, stage_id: int, raw: Any) -> None:
        notes = [self.notes[id(each)][1] for each in _things(raw)]
        if notes and not self.has_failed:
            self._has_its_turn(notes)
        for note in notes:
            self._goes(note)
        self.loop.spend(self.cost_s[stage_id])

    def _has_its_turn(self, notes: list[Note]) -> None:
        """All in the order of arrival, but every other raw output may be audio before text, without an end."""
        engine, stage = notes[0].engine, self.shape.stages[notes[0].stage]
        others = [other for other in self.waiting() if other.number < notes[0].number and other.engine is not engine]
        early = [other for other in others if _is_watched(other.engine)]  # an unavailable one keeps what it sent
        seen = notes[0].stage > 0 and self.shape.stages[0].final_output and stage.final_output
        may = seen and not any(note.ends or note.error for note in notes)
        if early and (not may or (self.was_early and all(each.works for each in chain(*self.engines)))):
            self.wrong.append(f"{notes} overtake {early}")
        self.was_early = bool(early)
        COUNTS["early"] += self.was_early

    def _goes(self, note: Note) -> None:
        line = self.lines[note.engine, note.request]
        over = note.request and note.request not in self.orchestrator.request_states
        if note not in line:
            self.wrong.append(f"{note} goes twice")
            return
        if line[0] is not note and not over:
            self.wrong.append(f"{note} goes before {line[0]}")
        line.remove(note)
        if over:
            return
        if not note.ends:
            return
        for other in self.waiting():
            early = other.request == note.request and other.number < note.number
            missed = not note.error or other.ends or self.shape.stages[other.stage].final_output
            if early and missed and (note.error or other.stage < note.stage):
                self.wrong.append(f"the end {note} overtakes {other}")

    def _sleeps(self) -> None:
        unread = [each.name for each in chain(*self.engines) if not each.down and each.outputs_queue.qsize()]
        if (unread or self.waiting()) and not self.has_failed:
            self.wrong.append(f"it sleeps while something waits: {unread or self.waiting()}")


class Drain(RuleBasedStateMachine):
    """What may happen to an orchestrator."""

    pipeline: tuple[Stage, ...]
    async_chunk: bool

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.names: list[str] = []
        self.waits: set[str] = set()
        self.ended: set[tuple[int, str]] = set()
        self.values = count(1)
        self.happened: list[tuple[Callable[..., None], Any, Any]] = []

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A world with the drain."""
        COUNTS["examples"] += 1
        entry = LEDGER.named("budgeted_drain")

        def one_of(*values: Any) -> Any:
            return data.draw(st.sampled_from(values))

        replicas, cost_s = one_of(1, 2, 3), one_of(0.0, 5e-5, 3e-4, 2e-3)
        stages = tuple(Stage(each.final_output, each.modality, replicas) for each in self.pipeline)
        self.shape = Shape(stages, self.async_chunk, coordinated=one_of(False, True), gated=one_of(False, True))
        entry.state = State.APPLIED
        entry.options = DrainOptions(max_items=one_of(16, 2, 1), max_time_us=one_of(2000, 50))
        event_driven, costs = one_of(False, True), tuple(cost_s * one_of(1.0, 0.2, 4.0) for _ in stages)
        self.world = Judged(self.shape, event_driven=event_driven, cost_s=costs)
        self.world.broken = one_of(None, None, FailsAt(LINES, data.draw(st.integers(1, 1500))))
        self.stack.callback(self.world.close)
        assert TheDrain.running, "not the loop that it should be"
        self._submit("DELTA", "all", 2)

    def do(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Let something happen, which will happen to stock too."""
        self.happened.append((act, args, kwargs))
        with self.world.armed():
            act(self.world, *args, **kwargs)
        if self.world.has_failed:  # upstream's own loop gets enough time for it: nothing waits there
            self.world.advance(0.6 if self.world.pipeline.orchestrator._event_driven_orch else 0.05)

    # ---- What happens ----

    @precondition(lambda self: len(self.names) < 8)
    @rule(
        kind=st.sampled_from(("DELTA", "DELTA", "CUMULATIVE", "FINAL_ONLY")),
        asks=st.sampled_from(("all", "all", "last", "first")),
        several=st.integers(1, 3),
    )
    def submit(self, kind: str, asks: str, several: int) -> None:
        """Requests come."""
        self._submit(kind, asks, several)

    def _submit(self, kind: str, asks: str, several: int) -> None:
        seen = tuple(stage for stage, each in enumerate(self.shape.stages) if each.final_output)
        for _ in range(several):
            self.names.append(f"q{len(self.names)}")
            asked = {"all": seen, "last": seen[-1:], "first": seen[:1]}[asks]
            self.do(World.submit, self.names[-1], kind, asked)
        self.world.advance(0.0002)

    def _working(self) -> dict[int, list[str]]:
        """The requests that each stage may send something of."""
        found: dict[int, list[str]] = defaultdict(list)
        for (stage, name), engine in self.world.work.items():
            if engine.works:
                found[stage].append(name)
        return found

    @precondition(lambda self: self._working())
    @rule(
        data=st.data(),
        times=st.integers(1, 4),
        finish=st.sampled_from(("", "", "stop", "stop", "stop", "length", "error")),
        stats=st.booleans(),
    )
    def send(self, data: st.DataObject, times: int, finish: str, stats: bool) -> None:
        """Stages send raw outputs of some of their requests, and may end them with the last."""
        for _ in range(times):
            if working := self._working():
                stage = data.draw(st.sampled_from(sorted(working)))
                names = data.draw(st.lists(st.sampled_from(working[stage]), min_size=1, max_size=3, unique=True))
                self._send(stage, names, data.draw(st.sampled_from((1, 1, 2, 5, 40))), finish, stats=stats)

    def _send(self, stage: int, names: list[str], burst: int, finish: str, *, stats: bool) -> None:
        kinds = KINDS[self.shape.stages[stage].modality]
        if not self.async_chunk and stage == 0 and not finish:
            kinds = (*kinds, "kv")
        for left in reversed(range(burst)):
            entries = []
            for name in names:
                ends = finish if not left and self._may_end(stage, name, finish) else ""
                self.ended |= {(stage, name)} if ends else set()
                value = next(self.values)
                entries.append((name, kinds[value % len(kinds)], value, ends))
            self.do(World.send, stage, tuple(entries), stats=stats)

    def _may_end(self, stage: int, name: str, finish: str) -> bool:
        """No stage ends before what it is made from; elsewhere any order may be seen of sockets.

        Where only audio was asked for, upstream loses a message, or sends two ends, if the text's end is seen after the
        audio's.
        """
        if finish == "error":
            return True
        stages, asked = self.shape.stages, self.world.asked[name]
        return all(
            (each, name) in self.ended
            for each in range(stage)
            if not self.async_chunk or (stages[each].final_output and each not in asked)
        )

    @precondition(lambda self: self.names)
    @rule(data=st.data(), what=st.sampled_from((None, None, None, None, "abort", "die", "attach", "detach")))
    def trouble(self, data: st.DataObject, what: str | None) -> None:
        """A user leaves, or waits for the abort; a replica dies, or comes; the coordinator takes one away."""
        live = self._live()
        if what == "abort":
            name, waits = data.draw(st.sampled_from(self.names)), data.draw(st.booleans())
            self.do(World.abort, name, waits=waits)
            self.waits |= {name} if waits else set()
        elif what == "attach":
            stage = data.draw(st.integers(0, len(self.shape.stages) - 1))
            if len(self.world.engines[stage]) < 5:
                self.do(World.attach, stage, data.draw(st.sampled_from((None, *self._free_slots(stage)))))
        elif (what == "die" or (what == "detach" and self.shape.coordinated)) and live:
            self.do(getattr(World, what), *data.draw(st.sampled_from(live)))
        COUNTS[what or "no trouble"] += 1

    def _live(self) -> list[tuple[int, int]]:
        """The replicas that work; of these, where something waits, those with a backlog."""
        busy = {note.engine for note in self.world.waiting()}
        places = [(stage, n) for stage, engines in enumerate(self.world.engines) for n in range(len(engines))]
        live = [(stage, n) for stage, n in places if self.world.engines[stage][n].works]
        return [(stage, n) for stage, n in live if self.world.engines[stage][n] in busy] or live

    def _free_slots(self, stage: int) -> list[int]:
        """The replicas whose death was heard, into whose slot none has come."""
        engines = self.world.engines[stage]
        return [
            which
            for which, each in enumerate(engines)
            if each.heard and each.replica_id not in [other.replica_id for other in engines[which + 1 :]]
        ]

    @rule(seconds=st.sampled_from((0.0, 5e-5, 3e-4, 2e-3, 2e-2, None)))
    def advance(self, seconds: float | None) -> None:
        """Time goes by; or enough of it."""
        if seconds is None:
            self.rest()
        else:
            self.world.advance(seconds)

    def rest(self) -> None:
        """All that came is dispatched, and then the loop sleeps."""
        for _ in range(100):
            self.world.advance(0.1)
            if not self.world.waiting():
                break
        assert not self.world.waiting(), "it was never dispatched"
        if not self.world.has_failed:
            self.world.advance(0.6)
        if self.world.has_failed:
            return
        loop = TheDrain.running[-1]
        watched = [each for each in chain(*self.world.engines) if _is_watched(each)]
        assert {*watched} == {each.client for each in loop._replicas.values() if isinstance(each, QueuedReplica)}
        assert not loop._line
        self.world.advance(2.0)
        is_idle = self.world.has_failed or self.world.loop.turns < 60
        assert is_idle, f"an idle loop takes {self.world.loop.turns} turns"

    @invariant()
    def nothing_is_wrong(self) -> None:
        """What the model has seen."""
        assert not self.world.wrong, "\n".join(self.world.wrong[:3])

    # ---- What comes of it ----

    def teardown(self) -> None:
        """Each request got what it gets of stock."""
        with self.stack:
            if hasattr(self, "world") and not (self.world.wrong or self.world.task.done()):
                self._compare()

    def _compare(self) -> None:
        for _ in self.shape.stages:  # without async-chunk the end of a stage begins the next one
            for stage in range(len(self.shape.stages)):
                for name in self._working().get(stage, ()):
                    self._send(stage, [name], 2, "stop", stats=False)
            self.rest()
            self.nothing_is_wrong()
        ours, left = self.world, self.world.left()
        if ours.broken is not None and ours.broken.at is not None:
            COUNTS["raised"] += 1
            assert ours.has_failed, f"{ours.broken.at} raised, and the state does not say so"
            assert not TheDrain.running
            assert not any(map(_is_watched, chain(*ours.engines)))
        assert {each.rpc_id for each in ours.answers()} == self.waits
        available = _available(ours)
        ours.close()
        theirs = self.on_stock()
        assert available == _available(theirs)
        wrong = []
        for name in self.names:
            a, b = ours.got[name], theirs.got[name]
            wrong += [f"{name}: {each}" for each in _differences(a, b)]
            more = {place for place, of in left - theirs.left() if of == name}
            if a.lost or b.lost or a.errors or b.errors:
                more &= {"requests"} if a.ends else set()
            wrong += [f"{name}: left behind in {more}"] if more else []
            fate = "lost" if a.lost or b.lost else "failed" if a.errors else "done" if a.ends else "at work"
            COUNTS[fate] += 1
        assert not wrong, "\n".join(wrong)

    def on_stock(self) -> World:
        """Where the same happened to stock."""
        with stock():
            theirs = World(self.shape, event_driven=True)
            self.stack.callback(theirs.close)
            for act, args, kwargs in self.happened:
                act(theirs, *args, **kwargs)
                theirs.advance(0.6)  # as long as upstream's loop may take to notice a new replica
        theirs.answers()
        return theirs


def _things(raw: Any) -> list[Any]:
    return [each for each in (*raw.outputs, raw.scheduler_stats) if each is not None]


def _is_watched(engine: Engine) -> bool:
    return "put_nowait" in vars(engine.outputs_queue)


def _available(world: World) -> list[list[str]]:
    pools = world.pipeline.pools
    return [sorted(pool.clients[each].name for each in pool.available_replica_ids()) for pool in pools]


def _differences(ours: Got, stock: Got) -> Iterator[str]:
    """What a request got that it should not have got, or not.

    Equal to stock's is what one got that came to no harm. Where it failed, what came after that may come before it is
    heard: stock's is the beginning of ours. Where something was lost on the way, or the request was given to a stage so
    much later that another replica has it, which may die or not, either may have got further. Upstream loses the last
    message of a request that fails while it keeps it for the end of a stage before (``pending_final_output``).
    """
    moved = any(ours.engines[stage] != stock.engines[stage] for stage in ours.engines.keys() & stock.engines.keys())
    lost, failed = moved or ours.lost or stock.lost, bool(ours.errors or stock.errors)
    for stage in {*ours.stages, *stock.stages}:
        a, b = ours.stages[stage], stock.stages[stage]
        kept = failed and b and a == b[:-1] and b[-1][:2] == ("OutputMessage", True)
        until = min(len(a), len(b)) if lost else len(b) if failed else None
        if a[:until] != b[:until] and not kept:
            yield f"stage {stage} says {a}, stock's {b}"
    ends = ours.ends, ours.last_is_end
    if lost or failed:
        # Upstream goes on giving a request to its stages after a detach or a death has failed it, which may fail again.
        again = max(len(ours.errors) - 1, 0) if lost else 0
        if (ends != (1 + again, True) and (ours.ends or not lost)) or (ours.errors and not (stock.errors or lost)):
            yield f"ends {ends}, errors {ours.errors}, stock's {stock.errors}"
    elif ends != (stock.ends, stock.last_is_end):
        yield f"ends {ends}, stock's {stock.ends, stock.last_is_end}"
    died = any(fatal for fatal, *_ in ours.errors + stock.errors)
    if not (lost or died) and ours.errors != stock.errors:
        yield f"errors {ours.errors}, stock's {stock.errors}"


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_drain(pipeline: str) -> None:
    """Raw outputs go once and in order, audio beside text at every other turn; ends are last, answers are stock's."""
    stages, async_chunk = PIPELINES[pipeline]
    machine: Any = type("Drain", (Drain,), {"pipeline": stages, "async_chunk": async_chunk})
    examples = settings().max_examples // len(PIPELINES)
    machine.TestCase.settings = settings(machine.TestCase.settings, max_examples=examples)
    COUNTS.clear()
    with silent(), switched_on():
        machine.TestCase().runTest()
    print(f"{pipeline}: {dict(sorted(COUNTS.items()))}")  # noqa: T201
    assert all(COUNTS[each] for each in ("done", "failed", "lost", "die", "attach", "raised")), COUNTS
    assert bool(COUNTS["early"]) == stages[0].final_output, COUNTS
