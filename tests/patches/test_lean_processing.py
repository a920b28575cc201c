"""``lean_processing``: results are stock's to the last digit, and outputs that nothing receives are not built."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.patches.drive import only
from tests.patches.lean_processing_script import KINDS, Play, Setting, everything

pytestmark = [pytest.mark.upstream, pytest.mark.every_release]


@contextmanager
def switched_on(*others: str) -> Iterator[dict[str, int]]:
    """The patch, and these, installed meanwhile; its counters."""
    with only(*others, "lean_processing") as entry:
        yield entry.counters


Both = Callable[[Setting], dict[str, int]]
TEXTS = ("fast", "slow")
"""Both of vLLM's detokenizers."""


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """Plays a script on stock and with the patch and compares all results; returns the counters."""

    def run(setting: Setting) -> dict[str, int]:
        stock = Play(setting, monkeypatch).run()
        with switched_on() as counters:
            _assert_same(stock, Play(setting, monkeypatch).run())
        assert counters["raw_outputs"] > 0
        return counters

    return run


def _assert_same(stock: dict[str, Any], lean: dict[str, Any]) -> None:
    for what, found in stock.items():
        assert lean[what] == found, what
    assert repr(lean) == repr(stock)  # types and last digits too


SETTINGS = (
    *(Setting(seed, kind, chunks) for seed in (0, 1) for kind in (*KINDS, "mixed") for chunks in (True, False)),
    *(Setting(seed, kind, detokenizer=each) for seed in (100, 101) for kind in ("DELTA", "mixed") for each in TEXTS),
    *(Setting(seed, "mixed", statistics=False) for seed in (300, 301)),
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_results_are_stocks(both: Both, setting: Setting) -> None:
    """Messages, terminals, aborts, statistics, times, texts, stop strings and log probabilities are equal."""
    counters = both(setting)
    if setting.kind != "mixed" and setting.detokenizer == "none":
        assert bool(counters["not_built"]) == (setting.async_chunk and setting.kind != "FINAL_ONLY")


# ---- What is built, and what is not ----


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Play, dict[str, int]]]:
    """The patch on, one request at every stage."""
    with switched_on() as counters:
        play = Play(Setting(0), monkeypatch)
        play.add("r")
        yield play, counters


def _talk(play: Play, steps: int = 5, **fields: Any) -> list[Any]:
    from vllm_omni.engine import OmniEngineCoreOutput

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


def _has(owner: Callable[[Play], Any], **values: Any) -> Callable[[Play], None]:
    """A condition: what *owner* finds has these attributes."""

    def becomes_true(play: Play) -> None:
        for name, value in values.items():
            setattr(owner(play), name, value)

    return becomes_true


def _orchestrator(play: Play) -> Any:
    return play.orchestrator


def _request(play: Play) -> Any:
    return play.orchestrator.request_states["r"]


def _at_stage(play: Play) -> Any:
    return play.pipeline.pools[1].output_processor.request_states["r"]


def _is_duplex(play: Play) -> None:
    play.orchestrator.__class__ = type("Duplex", (type(play.orchestrator),), {})


def _has_another_detokenizer(play: Play) -> None:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    _at_stage(play).detokenizer = type("Other", (IncrementalDetokenizer,), {})()


CONDITIONS: dict[str, Callable[[Play], Any]] = {
    "session": _has(lambda play: _request(play).streaming, enabled=True),
    "owned by a session": _has(_request, session_owned=True, duplex_identity=object()),  # the second on 0.28
    "companion": lambda play: play.orchestrator._cfg_tracker._companion_ids.add("r"),
    "has companions": lambda play: play.orchestrator._cfg_tracker._companion_map.update(r={}),
    "prefill and decode apart": _has(_orchestrator, _pd_pair=(0, 1)),
    "final output": _has(lambda play: play.pipeline.pools[1].clients[0], final_output=True),
    "fed by the orchestrator": _has(_orchestrator, _stage_receives_async_chunks=lambda _stage_id: False),
    "no async-chunk": _has(_orchestrator, async_chunk=False),
    "duplex": _is_duplex,
    "a duplex plane": _has(
        _orchestrator,
        duplex_control_plane=object(),
        _duplex_output_decision=lambda *_: None,  # the second on 0.28
    ),
    "stream interval": _has(_at_stage, stream_interval=2),
    "a detokenizer that was not read": _has_another_detokenizer,
    "unknown to the orchestrator": lambda play: play.orchestrator.request_states.pop("r"),
}


@pytest.mark.parametrize("why", CONDITIONS)
def test_what_something_may_receive_is_built(lean: tuple[Play, dict[str, int]], why: str) -> None:
    """Each condition by itself is enough for upstream to make every output."""
    play, counters = lean
    CONDITIONS[why](play)
    found = _talk(play)
    assert counters["not_built"] == 0
    assert all(each.outputs for each in found)
    assert found[0].outputs[0].cumulative_token_ids == [7]


def test_an_entry_that_brings_more_than_tokens_is_built(lean: tuple[Play, dict[str, int]]) -> None:
    """Any field beside tokens and the two that only statistics read, on every release."""
    import msgspec
    from vllm_omni.engine import OmniEngineCoreOutput

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

    from benchmarks.rigs.inprocess import text

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
