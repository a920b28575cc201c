"""An exception of ours at each line in turn, in schedules that never change; ``test_drain`` has all others."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings

pytest.importorskip("vllm_omni")

from vllm.v1.engine import FinishReason

from benchmarks.rigs.inprocess import Pipeline, Stage, audio, batch, text
from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from tests.patches.drive import switched_on
from tests.patches.test_overtaking import diffusion_pipeline, of
from tests.schedules.drain_lines import Break, Line, lines
from tests.schedules.drain_world import Shape, World
from tests.schedules.test_drain import PIPELINES, Drain, Judged
from tests.schedules.virtual_time import VirtualLoop

pytestmark = pytest.mark.upstream

LINES = lines()
TIMES = (1, 2, 3, 5, 8, 13) if settings().max_examples > 50 else (1,)
"""At the so-manieth time."""
STOCK: dict[str, World] = {}
POLLED = ("DrainLoop._poll", "Dispatcher.", "DiffusionOutput.", "Death.", "HeldEnds.", "Work.")


class Polled:
    """An LLM client without an output queue."""

    stage_type, final_output, final_output_type = "llm", True, "audio"

    def __init__(self) -> None:
        last = audio("R", 1.0, finish=FinishReason.STOP)
        self._waiting = [*(batch(audio("R", float(n)), audio("S", float(n))) for n in range(9)), batch(last)]

    async def get_output_async(self) -> Any:
        """The next one; one with nothing in it when there is none."""
        return self._waiting.pop(0) if self._waiting else batch()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Nothing runs."""

    def shutdown(self) -> None:
        """Nothing to shut down."""


def polled_pipeline(end: str, event_driven: bool) -> Any:
    """Text waits, and audio or an image at a stage that can only be polled, with what ends ``R``."""
    if end != "audio":
        return diffusion_pipeline(end, event_driven)
    pipeline = Pipeline((Stage(True, "text"), Stage(True, "audio")), event_driven=event_driven)
    for request in ("R", "S"):
        pipeline.add_request(request)
    pipeline.put(0, *(batch(text("R", n), text("S", n)) for n in range(9)))
    pipeline.put(0, batch(text("R", 20, finish=FinishReason.STOP)))
    pipeline.pools[1].clients[0] = Polled()
    del pipeline.replicas[1][0]
    return pipeline


def served(end: str, event_driven: bool, broken: Break) -> tuple[list[Any], bool]:
    """The messages of ``R``, sorted, with the last one last; and whether its state is gone."""
    pipeline, loop = polled_pipeline(end, event_driven), VirtualLoop()
    with broken.armed():
        task = loop.create_task(pipeline.orchestrator.run())
        loop.go_on(0.1)
    assert not task.done(), task.exception()
    found = [(each.stage_id, type(each).__name__) for each in of("R", pipeline.messages())]
    for each in asyncio.all_tasks(loop):
        each.cancel()
    loop.go_on(0.1)
    loop.close()
    return [*sorted(found), found[-1]], "R" not in pipeline.orchestrator.request_states


@contextmanager
def _silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
@pytest.mark.parametrize("end", ["image", "error", "death", "audio"])
def test_where_replicas_are_polled(end: str, event_driven: bool) -> None:
    """The same messages as on stock, its end last, whatever line of the polled path raises."""
    wrong: list[tuple[Line, int, Any]] = []
    with _silent():
        expected = served(end, True, Break((), 1))
        assert expected[1]
        with switched_on(floor=0.0):
            entry = LEDGER.named("budgeted_drain")
            whole = Break(LINES, float("inf"))
            assert served(end, event_driven, whole) == expected
            polled = [line for line in whole.reached if line.function.startswith(POLLED)]
            for line, times in itertools.product(polled, TIMES):
                broken = Break([line], times)
                found = served(end, event_driven, broken)
                if found != expected or entry.has_failed != (broken.at is not None):
                    wrong.append((line, times, found))
                entry.state = State.APPLIED
    assert not wrong, wrong
    assert len(polled) > 20


class Script(Drain):
    """Text, codes and audio of six requests; ends that wait, an error, two deaths, an attach, an abort, a session.

    Args:
        broken: Raises while it happens.
        event_driven: The orchestrator's mode.
    """

    pipeline, async_chunk = PIPELINES["omni"]

    def __init__(self, broken: Break, *, event_driven: bool) -> None:
        super().__init__()
        stages = tuple(dataclasses.replace(each, replicas=2) for each in self.pipeline)
        self.shape = Shape(stages, self.async_chunk, coordinated=False, gated=False)
        self.world = Judged(self.shape, event_driven=event_driven, cost_s=(5e-5,) * 3, floor=0.1)
        self.stack.callback(self.world.close)
        self.world.broken = broken

    def on_stock(self) -> World:
        """The same happens each time, to one world."""
        done = repr(self.happened)
        if done not in STOCK:
            STOCK[done] = super().on_stock()
        return STOCK[done]

    def play(self) -> None:
        """All of it, and what comes of it."""
        self._submit("DELTA", "all", 2, session=False)
        self._submit("CUMULATIVE", "last", 1, session=False)
        self._submit("DELTA", "all", 1, session=True)
        self.world.advance(0.01)
        for stage in range(3):
            self._send(stage, ["q0", "q1"], 2, "", stats=True)
            self._send(stage, ["q2", "q3"], 2, "", stats=False)
        self.world.advance(5e-5)
        self._send(2, ["q0", "q2"], 2, "stop", stats=True)
        self._send(1, ["q1"], 2, "error", stats=False)
        for stage in range(3):
            self._send(stage, ["q3"], 2, "stop", stats=False)
        self._send(0, ["q0", "q2"], 1, "stop", stats=True)
        self.world.advance(3e-4)
        self._submit("DELTA", "all", 4, session=False)
        self.world.advance(0.01)
        late = self.names[4:]
        for stage in (2, 1, 0):
            self._send(stage, late, 2, "", stats=False)
        self.do(World.die, 2, 0)
        self.do(World.attach, 1)
        self.world.advance(5e-5)
        self._send(0, late, 2, "", stats=False)
        self.do(World.die, 0, 1)
        self.do(World.abort, late[1], waits=True)
        self.waits.add(late[1])
        self.rest()
        self.do(World.attach, 2, 0)
        self.rest()
        self.nothing_is_wrong()
        self.teardown()


@pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
def test_where_all_is_queued(event_driven: bool) -> None:
    """What stock gives each request, whatever line raises."""
    wrong: list[tuple[Line, int, str]] = []
    with _silent(), switched_on():
        entry = LEDGER.named("budgeted_drain")
        whole = Break(LINES, float("inf"))
        Script(whole, event_driven=event_driven).play()
        assert LEDGER.named("budgeted_drain").counters["held"] > 1
        chosen = [*whole.reached]
        chosen = chosen if len(TIMES) > 1 else chosen[event_driven::2]  # in the short form each mode has its half
        for line, times in itertools.product(chosen, TIMES):
            entry.state = State.APPLIED
            try:
                Script(Break([line], times), event_driven=event_driven).play()
            except AssertionError as error:
                wrong.append((line, times, str(error)[:500]))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(whole.reached) > 200


@pytest.mark.parametrize("event_driven", [False, True], ids=["poll", "event-driven"])
def test_what_arrives_after_a_failed_arrival_stays_behind_it(event_driven: bool) -> None:
    """Text that got no number is not overtaken by its request's error, which arrives before the loop steps aside."""
    line = next(line for line in LINES if line.function == "QueuedReplica.follow_queue")
    with _silent(), switched_on():
        broken = Break([line], 1)
        script = Script(Break((), 1), event_driven=event_driven)
        script._submit("DELTA", "all", 1, session=False)
        script.world.advance(0.01)
        script.world.broken = broken
        with broken.armed():
            for given in ((0, (("q0", "text", 1, ""),)), (2, (("q0", "audio", 2, "error"),))):
                World.send(script.world, *given)
                script.happened.append((World.send, given, {}))
        assert broken.at == line
        script.world.advance(0.1)
        script.teardown()
        assert script.world.got["q0"].stages[0]
