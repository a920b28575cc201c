"""An exception at each line of the drain in turn, in fixed schedules; ``test_drain`` has random ones."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.importorskip("vllm_omni")

from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.outputs import OmniRequestOutput

from benchmarks.rigs.inprocess import Pipeline, Stage, audio, batch, text
from omni_fastpath.declare import State
from omni_fastpath.ledger import LEDGER
from omni_fastpath.patches.budgeted_drain.drain import Drain as TheDrain
from tests.patches.drive import silent, stages, switched_on
from tests.patches.lines import FailsAt, Line, traced
from tests.schedules.drain_world import Shape, World
from tests.schedules.test_drain import LINES, PIPELINES, Drain, Judged
from tests.schedules.virtual_time import VirtualLoop

pytestmark = pytest.mark.upstream

TIMES = (1, 2, 3, 5, 8, 13) if settings().max_examples > 50 else (1,)
"""How often a line is reached until it raises."""
STOCK: dict[str, World] = {}
POLLED = {
    (code.co_filename, number)
    for code in (each.__code__ for each in (TheDrain._take, TheDrain._handle_failure, TheDrain._evict))
    for _, _, number in code.co_lines()
}
"""Lines at which an exception changes nothing in poll mode, although stock's poll loop takes one replica at a time."""


class Polled:
    """A client that can only be polled: an LLM's without an output queue, or a diffusion stage's.

    Args:
        stage_type: Which of the two.
        final_output_type: What it makes.
        outputs: What waits; an exception is raised.
    """

    final_output = True

    def __init__(self, stage_type: str, final_output_type: str, *outputs: Any) -> None:
        self.stage_type, self.final_output_type = stage_type, final_output_type
        self._waiting = list(outputs)

    async def get_output_async(self) -> Any:
        """The next raw output; an empty one when there is none."""
        return self._waiting.pop(0) if self._waiting else batch()

    def get_diffusion_output_nowait(self) -> Any:
        """The next output, or None."""
        found = self._waiting.pop(0) if self._waiting else None
        if isinstance(found, BaseException):
            raise found
        return found

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Nothing runs."""

    def shutdown(self) -> None:
        """Nothing to shut down."""


def polled_pipeline(end: str, event_driven: bool) -> Any:
    """Text of two requests is queued, and a stage that can only be polled has what ends ``R``."""
    last = audio("R", 1.0, finish=FinishReason.STOP)
    sounds = [*(batch(audio("R", float(n)), audio("S", float(n))) for n in range(9)), batch(last)]
    image = OmniRequestOutput(request_id="R", finished=True, final_output_type="image", images=[1], stage_id=1)
    error = OmniRequestOutput.from_error("R", "it broke")
    client = {
        "audio": Polled("llm", "audio", *sounds),
        "image": Polled("diffusion", "image", image),
        "error": Polled("diffusion", "image", error),
        "death": Polled("diffusion", "image", EngineDeadError()),
    }[end]
    both = (Stage(True, "text"), Stage(True, client.final_output_type))
    pipeline = Pipeline(both, async_chunk=end == "audio", event_driven=event_driven)
    for request in ("R", "S"):
        pipeline.add_request(request)
    if end != "audio":
        pipeline.pools[1].output_processor.request_states.clear()
    pipeline.put(0, *(batch(text("R", n), text("S", n)) for n in range(9)))
    pipeline.put(0, batch(text("R", 20, finish=FinishReason.STOP)))
    pipeline.pools[1].clients[0] = client
    del pipeline.replicas[1][0]
    return pipeline


def served(end: str, event_driven: bool, broken: FailsAt) -> tuple[list[Any], bool]:
    """The messages of ``R``, sorted, with the last one last; and whether its state is gone."""
    pipeline, loop = polled_pipeline(end, event_driven), VirtualLoop()
    with traced("budgeted_drain", broken):
        task = loop.create_task(pipeline.orchestrator.run())
        loop.go_on(0.1)
    assert not task.done(), task.exception()
    found = [(each.stage_id, type(each).__name__) for each in pipeline.messages() if each.request_id == "R"]
    for each in asyncio.all_tasks(loop):
        each.cancel()
    loop.go_on(0.1)
    loop.close()
    return [*sorted(found), found[-1]], "R" not in pipeline.orchestrator.request_states


@pytest.mark.parametrize("end", ["image", "error", "death", "audio"])
def test_where_replicas_are_polled(end: str, event_driven: bool) -> None:
    """An exception at any line leaves a request the messages of stock, its end last."""
    wrong: list[tuple[Line, int, Any]] = []
    with silent():
        expected = served(end, True, FailsAt((), 1))
        assert expected[1]
        with switched_on():
            entry = LEDGER.named("budgeted_drain")
            whole = FailsAt(LINES, float("inf"))
            assert served(end, event_driven, whole) == expected
            polled = [line for line in whole.reached if line in POLLED or Path(line[0]).stem == "work"]
            for line, times in itertools.product(polled, TIMES):
                broken = FailsAt([line], times)
                found = served(end, event_driven, broken)
                if found != expected or entry.has_failed != (broken.at is not None):
                    wrong.append((line, times, found))
                entry.state = State.APPLIED
    assert not wrong, wrong
    assert len(polled) > 20


class Script(Drain):
    """Text, codes and audio of six requests; ends that wait, an error, two deaths, an attach, an abort.

    Args:
        broken: Raises while it happens.
        event_driven: The orchestrator's mode.
    """

    pipeline, async_chunk = PIPELINES["omni"]

    def __init__(self, broken: FailsAt, *, event_driven: bool) -> None:
        super().__init__()
        self.shape = Shape(tuple(stages(2)))
        self.world = Judged(self.shape, event_driven=event_driven, cost_s=(5e-5,) * 3)
        self.stack.callback(self.world.close)
        self.world.broken = broken

    def on_stock(self) -> World:
        """Stock's result, computed once for the same events."""
        done = repr(self.happened)
        if done not in STOCK:
            STOCK[done] = super().on_stock()
        return STOCK[done]

    def play(self) -> None:
        """All of it, and what comes of it."""
        self._submit("DELTA", "all", 2)
        self._submit("CUMULATIVE", "last", 1)
        self._submit("DELTA", "all", 1)
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
        self._submit("DELTA", "all", 4)
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


def test_where_all_is_queued(event_driven: bool) -> None:
    """An exception at any line leaves each request what stock gives it."""
    wrong: list[tuple[Line, int, str]] = []
    with silent(), switched_on():
        entry = LEDGER.named("budgeted_drain")
        whole = FailsAt(LINES, float("inf"))
        Script(whole, event_driven=event_driven).play()
        chosen = [*whole.reached]
        chosen = chosen if len(TIMES) > 1 else chosen[event_driven::2]  # in the short form each mode has its half
        for line, times in itertools.product(chosen, TIMES):
            entry.state = State.APPLIED
            try:
                Script(FailsAt([line], times), event_driven=event_driven).play()
            except AssertionError as error:
                wrong.append((line, times, str(error)[:500]))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(whole.reached) > 100
