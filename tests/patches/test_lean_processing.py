"""``lean_processing``: results are stock's to the last digit, and outputs that nothing receives are not built."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm_omni.engine import OmniEngineCoreOutput

from benchmarks.rigs.inprocess import text
from tests.patches.drive import only
from tests.patches.lean_processing_script import KINDS, Play, Setting, everything

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


TEXTS = ("fast", "slow")
"""Both of vLLM's detokenizers."""
SETTINGS = (
    *(Setting(seed, kind, chunks) for seed in (0, 1) for kind in (*KINDS, "mixed") for chunks in (True, False)),
    *(Setting(seed, kind, detokenizer=each) for seed in (100, 101) for kind in ("DELTA", "mixed") for each in TEXTS),
    *(Setting(seed, "mixed", statistics=False) for seed in (300, 301)),
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_results_are_stocks(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, terminals, aborts, statistics, times, texts, stop strings and log probabilities are equal."""
    stock = Play(setting, monkeypatch).run()
    with only("lean_processing") as entry:
        lean = Play(setting, monkeypatch).run()
    for what, found in stock.items():
        assert lean[what] == found, what
    assert repr(lean) == repr(stock)  # types and last digits too
    assert entry.counters["raw_outputs"] > 0
    if setting.kind != "mixed" and setting.detokenizer == "none":
        assert bool(entry.counters["not_built"]) == (setting.async_chunk and setting.kind != "FINAL_ONLY")


# ---- What is built, and what is not ----


def _play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """One request at every stage."""
    play = Play(Setting(0), monkeypatch)
    play.add("r")
    return play


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Play, dict[str, int]]]:
    """The patch on, one request at every stage."""
    with only("lean_processing") as entry:
        yield _play(monkeypatch), entry.counters


def _talk(play: Play, steps: int = 5, **fields: Any) -> list[Any]:
    async def run() -> list[Any]:
        found = []
        for _ in range(steps):
            found += await play.step(1, OmniEngineCoreOutput("r", [7], **fields))
        return found

    return asyncio.run(run())


def test_first_output_is_built_and_the_next_are_not(lean: tuple[Play, dict[str, int]]) -> None:
    """The first output with content is built, because users may get its time; later ones have only an id."""
    play, counters = lean
    first, *others = _talk(play)
    assert first.outputs[0].token_ids == [7]
    assert [(each.request_id, each.outputs, each.finished) for each in others] == [("r", [], False)] * 4
    assert counters["not_built"] == 4


def test_a_pool_that_keeps_no_times_needs_no_first_output(lean: tuple[Play, dict[str, int]]) -> None:
    """With 0.32's ``--no-collect-stage-metrics`` there is no time of a first output, and none is built for it."""
    play, counters = lean
    vars(play.pipeline.pools[1]).update(collect_stage_metrics=False)
    assert [each.outputs for each in _talk(play)] == [[]] * 5
    assert counters["not_built"] == 5


def _conditions(play: Play) -> dict[str, Callable[[], Any]]:
    """What makes each condition true for the request of the fixture."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    orchestrator, pool = play.orchestrator, play.pipeline.pools[1]
    request, at_stage = orchestrator.request_states["r"], pool.output_processor.request_states["r"]

    def has(owner: Any, **values: Any) -> Callable[[], None]:
        return partial(vars(owner).update, values)

    return {
        "session": has(request.streaming, enabled=True),
        "owned by a session": has(request, session_owned=True, duplex_identity=object()),  # the second on 0.28
        "companion": lambda: orchestrator._cfg_tracker._companion_ids.add("r"),
        "has companions": lambda: orchestrator._cfg_tracker._companion_map.update(r={}),
        "prefill and decode apart": has(orchestrator, _pd_pair=(0, 1)),
        "final output": has(pool.clients[0], final_output=True),
        "fed by the orchestrator": has(orchestrator, _stage_receives_async_chunks=lambda _stage_id: False),
        "no async-chunk": has(orchestrator, async_chunk=False),
        "duplex": partial(setattr, orchestrator, "__class__", type("Duplex", (type(orchestrator),), {})),
        # The second on 0.28.
        "a duplex plane": has(orchestrator, duplex_control_plane=object(), _duplex_output_decision=lambda *_: None),
        "stream interval": has(at_stage, stream_interval=2),
        "a detokenizer that was not read": has(at_stage, detokenizer=type("Other", (IncrementalDetokenizer,), {})()),
        "unknown to the orchestrator": lambda: orchestrator.request_states.pop("r"),
    }


def test_what_something_may_receive_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each condition by itself is enough for upstream to make every output."""
    with only("lean_processing") as entry:
        for why in _conditions(_play(monkeypatch)):
            play = _play(monkeypatch)
            _conditions(play)[why]()
            found = _talk(play)
            assert entry.counters["not_built"] == 0, why
            assert all(each.outputs for each in found), why
            assert found[0].outputs[0].cumulative_token_ids == [7], why


def test_an_entry_that_brings_more_than_tokens_is_built(lean: tuple[Play, dict[str, int]]) -> None:
    """Any field beside tokens and the two that only statistics read, on every release."""
    import msgspec

    from omni_fastpath.patches.lean_processing.processor import _is_step
    from omni_fastpath.patches.lean_processing.unseen import unseen_of

    play, _ = lean
    _talk(play, 2)
    processor = play.pipeline.pools[1].output_processor
    state = processor.request_states["r"]
    assert unseen_of(processor, state, OmniEngineCoreOutput("r", [7])) is not None
    entry = OmniEngineCoreOutput.__base__("r", [7])  # vLLM's own, which has less
    assert unseen_of(processor, state, entry) is None
    assert not _is_step(state, entry, 1.0, None, {})
    goes_by = [
        field.name
        for field in msgspec.structs.fields(OmniEngineCoreOutput)
        if unseen_of(processor, state, OmniEngineCoreOutput(**{"request_id": "r", "new_token_ids": [7], field.name: 5}))
    ]
    assert {"request_id", "new_token_ids"} <= set(goes_by)
    assert set(goes_by) <= {"request_id", "new_token_ids", "num_generation_tokens", "is_coalesced"}


# ---- Token ids ----


def test_a_copy_has_the_ids_too(lean: tuple[Play, dict[str, int]]) -> None:
    """A copy of a completion, and a pickle of it, has the same content and upstream's class."""
    from vllm.outputs import CompletionOutput

    play, _ = lean
    (output,) = asyncio.run(play.step(0, text("r", 7)))
    (completion,) = output.outputs
    assert "cumulative_token_ids" not in vars(completion)  # copied by the first read, which all later ones return
    completion.cumulative_token_ids.append(9)
    assert completion.cumulative_token_ids == [7, 9]
    assert isinstance(completion, CompletionOutput)
    sent = pickle.loads(pickle.dumps(completion))  # noqa: S301
    for other in (copy.copy(completion), copy.deepcopy(completion), sent):
        assert everything(other) == everything(completion)
