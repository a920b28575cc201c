"""``lean_processing``: what comes of raw outputs is stock's to the last digit, and what nobody sees is not built."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.lean_processing_script import KINDS, Clock, Play, Setting, everything

pytestmark = pytest.mark.upstream
every_release = pytest.mark.every_release

TOO = {"OMNI_FASTPATH": "1", "OMNI_FASTPATH_LEAN_PROCESSING": "1"}
ALONE = {"OMNI_FASTPATH_LEAN_PROCESSING": "1"}


@contextmanager
def switched_on(environment: dict[str, str] = ALONE) -> Iterator[dict[str, int]]:
    """Installed meanwhile; its counters."""
    from omni_fastpath import config
    from omni_fastpath.declare import Process, State
    from omni_fastpath.install import apply, uninstall
    from omni_fastpath.ledger import LEDGER
    from omni_fastpath.patches import PATCHES

    apply(config.resolve([], environment, PATCHES), Process.SERVER)
    entry = LEDGER.named("lean_processing")
    assert entry.state is State.APPLIED, entry.reason
    try:
        yield entry.counters
    finally:
        for patch in reversed(PATCHES):
            uninstall(patch)


def _goes_past() -> bool:
    from omni_fastpath.patches.lean_processing.upstream import GOES_PAST

    return GOES_PAST


@pytest.fixture
def _unseen() -> None:
    if not _goes_past():
        pytest.skip("on this release what nobody sees is built")


unseen = pytest.mark.usefixtures("_unseen")
"""Of tests about what is not built."""

Both = Callable[[Setting], tuple[dict[str, Any], dict[str, Any], dict[str, int]]]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """A script on stock and with the patch; what came of it, and the counters."""

    def run(setting: Setting) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
        stock = Play(setting, monkeypatch).run()
        with switched_on() as counters:
            lean = Play(setting, monkeypatch).run()
        assert counters["requests"] > 0
        return stock, lean, counters

    return run


def _assert_same(stock: dict[str, Any], lean: dict[str, Any]) -> None:
    for what, found in stock.items():
        assert lean[what] == found, what
    assert repr(lean) == repr(stock)  # types and last digits too


@every_release
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("async_chunk", [True, False])
def test_what_comes_of_it_is_stocks(both: Both, kind: str, seed: int, async_chunk: bool) -> None:
    """Messages, terminals, aborts, statistics, every time and what is left are equal, without a tokenizer."""
    stock, lean, counters = both(Setting(seed, kind, async_chunk))
    _assert_same(stock, lean)
    if kind != "mixed":
        assert bool(counters["not_built"]) == (_goes_past() and async_chunk and kind != "FINAL_ONLY")


@every_release
@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "mixed"])
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("detokenizer", ["fast", "slow"])
def test_texts_and_stop_strings_are_stocks(both: Both, kind: str, seed: int, detokenizer: str) -> None:
    """With texts, offsets, stop strings and log probabilities too, as both of vLLM's detokenizers make them."""
    stock, lean, counters = both(Setting(seed, kind, detokenizer=detokenizer))
    _assert_same(stock, lean)
    assert bool(counters["not_built"]) == _goes_past()


@every_release
@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "mixed"])
@pytest.mark.parametrize("seed", range(200, 204))
@pytest.mark.parametrize("async_chunk", [True, False])
def test_sessions_are_stocks(both: Both, kind: str, seed: int, async_chunk: bool) -> None:
    """Sessions, which end segment by segment, beside requests that do not."""
    from vllm_omni.engine.orchestrator import Orchestrator

    if not hasattr(Orchestrator, "_process_llm_stage_outputs"):
        pytest.skip("up to 0.26 what is done for a session's segment stands in upstream's loop")
    stock, lean, _ = both(Setting(seed, kind, async_chunk, sessions=True))
    _assert_same(stock, lean)


@every_release
@pytest.mark.parametrize("seed", range(300, 304))
def test_without_statistics_it_is_stocks(both: Both, seed: int) -> None:
    """As with ``--disable-log-stats``."""
    stock, lean, _ = both(Setting(seed, "mixed", statistics=False))
    _assert_same(stock, lean)


@pytest.mark.parametrize("first", [0, 10])
def test_real_loops_say_what_stock_says(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random fleets with deaths and attaches, both loops, with the default set beside it."""
    from tests.fleets_dispatch import compare

    counted: list[int] = []

    @contextmanager
    def on() -> Iterator[None]:
        with switched_on(TOO) as counters:
            yield
            counted.append(counters["not_built"])

    monkeypatch.setattr(compare, "switched_on", on)
    wrong = [f"seed {each.seed}: {line}" for each in compare.verdicts(range(first, first + 10)) for line in each.ours]
    assert not wrong, "\n".join(wrong)
    assert sum(counted) > 0


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


@every_release
@unseen
def test_first_output_is_built_and_the_next_are_not(lean: tuple[Play, dict[str, int]]) -> None:
    """The first with something in it is a time that users may be told of; the others are a bare name."""
    play, counters = lean
    first, *others = _talk(play)
    assert first.outputs[0].token_ids == [7]
    assert [(each.request_id, each.outputs, each.finished) for each in others] == [("r", [], False)] * 4
    assert counters["not_built"] == 4


def _becomes_a_session(play: Play) -> None:
    play.orchestrator.request_states["r"].streaming.enabled = True


def _is_owned(play: Play) -> None:
    request = play.orchestrator.request_states["r"]
    request.session_owned, request.duplex_identity = True, object()  # the second up to 0.28


def _is_split(play: Play) -> None:
    play.orchestrator._pd_pair = (0, 1)


def _is_final(play: Play) -> None:
    play.pipeline.pools[1].clients[0].final_output = True


def _is_fed(play: Play) -> None:
    play.orchestrator._stage_receives_async_chunks = lambda _stage_id: False


def _has_no_chunks(play: Play) -> None:
    play.orchestrator.async_chunk = False


def _is_duplex(play: Play) -> None:
    play.orchestrator.__class__ = type("Duplex", (type(play.orchestrator),), {})


def _has_a_duplex_plane(play: Play) -> None:
    orchestrator = play.orchestrator
    if not hasattr(orchestrator, "_duplex_output_decision"):
        pytest.skip("from 0.30 on a duplex orchestrator is a class of its own")
    orchestrator.duplex_control_plane = object()
    orchestrator._duplex_output_decision = lambda *_: None


def _comes_in_intervals(play: Play) -> None:
    play.pipeline.pools[1].output_processor.request_states["r"].stream_interval = 2


CONDITIONS: dict[str, Callable[[Play], Any]] = {
    "session": _becomes_a_session,
    "owned by a session": _is_owned,
    "companion": lambda play: play.orchestrator._cfg_tracker._companion_ids.add("r"),
    "has companions": lambda play: play.orchestrator._cfg_tracker._companion_map.update(r={}),
    "prefill and decode apart": _is_split,
    "final output": _is_final,
    "fed by the orchestrator": _is_fed,
    "no async-chunk": _has_no_chunks,
    "duplex": _is_duplex,
    "a duplex plane": _has_a_duplex_plane,
    "stream interval": _comes_in_intervals,
    "unknown to the orchestrator": lambda play: play.orchestrator.request_states.pop("r"),
    "kv transfer": lambda _play: None,
}


@every_release
@unseen
@pytest.mark.parametrize("why", CONDITIONS)
def test_what_somebody_may_look_at_is_built(lean: tuple[Play, dict[str, int]], why: str) -> None:
    """Each condition by itself is enough for upstream to make every output."""
    play, counters = lean
    fields: dict[str, Any] = {"kv_transfer_params": {"kv": 1}} if why == "kv transfer" else {}
    CONDITIONS[why](play)
    found = _talk(play, **fields)
    assert counters["not_built"] == 0
    assert all(each.outputs for each in found)


@every_release
@unseen
def test_a_request_that_becomes_a_session_is_built_again(lean: tuple[Play, dict[str, int]]) -> None:
    """An update from the user makes a session of a request that runs."""
    play, _ = lean
    assert not _talk(play)[-1].outputs
    play.orchestrator.request_states["r"].streaming.enabled = True
    assert _talk(play)[-1].outputs


@every_release
@unseen
def test_a_request_twice_in_a_raw_output_is_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream accumulates all payloads before it makes the first output, so that the second has nothing to drain."""
    import torch
    from vllm.v1.engine import FinishReason
    from vllm_omni.engine import OmniEngineCoreOutput

    def run() -> list[Any]:
        play = Play(Setting(0), monkeypatch)
        play.add("r")
        play.add("s")

        def entry(name: str, finish: Any = None) -> Any:
            return OmniEngineCoreOutput(name, [7], multimodal_output={"image": torch.ones(1)}, finish_reason=finish)

        for _ in range(3):
            asyncio.run(play.step(1, entry("r"), OmniEngineCoreOutput("s", [7])))
        asyncio.run(play.step(1, entry("r"), OmniEngineCoreOutput("s", [7]), entry("r", finish=FinishReason.STOP)))
        return [everything(each) for each in (*play.pipeline.messages(), *play.held)]

    stock = run()
    with switched_on() as counters:
        assert run() == stock
    assert counters["not_built"] > 0


@every_release
def test_an_unknown_detokenizer_gets_upstreams_copies(lean: tuple[Play, dict[str, int]]) -> None:
    """Whose list may change in ways that nobody has read."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    class Other(IncrementalDetokenizer):  # type: ignore[misc]
        pass

    play, counters = lean
    play.pipeline.pools[1].output_processor.request_states["r"].detokenizer = Other()
    found = _talk(play, 2)
    assert [vars(each.outputs[0])["cumulative_token_ids"] for each in found] == [[7], [7, 7]]
    assert counters["not_built"] == counters["copied"] == 0


@every_release
@unseen
def test_what_cannot_be_decided_is_built(
    lean: tuple[Play, dict[str, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of ours in front of processing is logged, and the request goes on as on stock."""
    from omni_fastpath.patches.lean_processing import wrappers

    monkeypatch.setattr(wrappers, "_is_unseen", lambda *_: 1 / 0)
    play, counters = lean
    assert all(each.outputs for each in _talk(play))
    assert counters["not_built"] == 0


OURS = (
    "states.Unseen._look_at",
    "states.Unseen._goes_by",
    "states.Unseen.knows",
    "states.StandIn",
    "states.defer",
    "processor._brings_no_more",
    "wrappers._make_lean",
    "wrappers._decide",
    "wrappers._may_say_a_rate",
)


@every_release
@unseen
@pytest.mark.parametrize("what", OURS)
@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
def test_an_error_of_ours_steps_aside(
    what: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of ours, also in the middle of a request, is told once; upstream does the rest, as it would have."""
    import importlib

    from omni_fastpath.declare import State
    from omni_fastpath.ledger import LEDGER

    module, _, name = what.partition(".")
    owner: Any = importlib.import_module(f"omni_fastpath.patches.lean_processing.{module}")
    *path, name = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    stock = Play(Setting(3, kind), monkeypatch).run()
    ours, calls = getattr(owner, name), 0

    def breaks(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return ours(*args) if calls < 3 else 1 / 0

    with switched_on(), monkeypatch.context() as patched:
        patched.setattr(owner, name, breaks)
        lean = Play(Setting(3, kind), monkeypatch).run()
        entry = LEDGER.named("lean_processing")
        assert (entry.state, calls >= 3) == (State.FAILED, True)
        assert "ZeroDivisionError" in entry.reason
    _assert_same(stock, lean)


@every_release
@unseen
def test_a_client_that_cannot_be_remembered_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of somebody else's to which there are no weak references: its sample rate is found all the same."""
    import torch
    from vllm_omni.engine import OmniEngineCoreOutput

    class Slim:
        __slots__ = ("client",)

        def __init__(self, client: Any) -> None:
            self.client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self.client, name)

    def run() -> Any:
        play = Play(Setting(0), monkeypatch)
        play.add("r")
        pool = play.pipeline.pools[2]
        pool.clients[0] = Slim(pool.clients[0])
        asyncio.run(play.step(2, OmniEngineCoreOutput("r", [7], multimodal_output={"audio": torch.ones(3)})))
        return everything(pool._audio_frames_by_request), play.outcome()["messages"]

    stock = run()
    with switched_on():
        assert run() == stock


@every_release
@unseen
def test_a_sampling_mask_is_taken_out_as_on_stock(lean: tuple[Play, dict[str, int]]) -> None:
    """Where each output takes out what came since the last one, one with a mask to take out is built."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    if not hasattr(LogprobsProcessor, "pop_prompt_token_id_logprobs"):
        pytest.skip("before 0.32 the last output has all masks")
    play, _ = lean
    assert not _talk(play)[-1].outputs
    state = play.pipeline.pools[1].output_processor.request_states["r"]
    state.sampling_mask_chunks.append(SimpleNamespace(to_nested_list=lambda: [[7]]))
    built, bare = _talk(play, 2, multimodal_output={})
    assert built.outputs
    assert not state.sampling_mask_chunks
    assert not bare.outputs


# ---- Token ids ----


@every_release
def test_token_ids_are_copied_when_somebody_looks(lean: tuple[Play, dict[str, int]]) -> None:
    """They are what they were when the completion was made, however late the look, and a second look finds the same."""
    from benchmarks.rigs.inprocess import text

    play, counters = lean

    async def run() -> list[Any]:
        return [(await play.step(0, text("r", n)))[0].outputs[0] for n in range(4)]

    completions = asyncio.run(run())
    assert counters["copied"] == 0
    assert [each.cumulative_token_ids for each in reversed(completions)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]
    assert counters["copied"] == 4
    assert completions[2].cumulative_token_ids is completions[2].cumulative_token_ids
    completions[2].cumulative_token_ids.append(9)
    assert completions[3].cumulative_token_ids == [0, 1, 2, 3]


@every_release
@pytest.mark.parametrize("audible", [False, True])
def test_copies_are_upstreams_own(lean: tuple[Play, dict[str, int]], audible: bool) -> None:
    """A copy, and what another process gets, is of upstream's class and has its ids in it."""
    from vllm.outputs import CompletionOutput

    from benchmarks.rigs.inprocess import codes, text
    from benchmarks.rigs.upstream import PAYLOAD
    from omni_fastpath.patches.lean_processing.upstream import MultimodalCompletionOutput

    play, _ = lean
    (output,) = asyncio.run(play.step(0, codes("r") if audible else text("r", 7)))
    (completion,) = output.outputs
    has_one_class = PAYLOAD == "pooling_output"  # 0.22
    upstreams = MultimodalCompletionOutput if audible and not has_one_class else CompletionOutput
    assert isinstance(completion, upstreams)
    sent = pickle.loads(pickle.dumps(completion))  # noqa: S301
    for other in (copy.copy(completion), copy.deepcopy(completion), sent):
        assert type(other) is upstreams
        assert everything(other) == everything(completion)
        assert not [name for name in vars(other) if "fastpath" in name]


@every_release
def test_a_completion_is_what_it_is_on_stock_to_dataclasses(lean: tuple[Play, dict[str, int]]) -> None:
    """Equal to upstream's with the same fields, whichever is asked; one that was made of it has no ids, as on stock."""
    import dataclasses

    from benchmarks.rigs.inprocess import text

    play, _ = lean
    (output,) = asyncio.run(play.step(0, text("r", 7)))
    (completion,) = output.outputs
    other = copy.copy(completion)
    assert completion == other
    assert other == completion
    assert completion != dataclasses.replace(other, text="another")
    assert completion != 7
    again = dataclasses.replace(completion)
    assert again == completion
    for each in (again, copy.copy(again), pickle.loads(pickle.dumps(again))):  # noqa: S301
        assert not hasattr(each, "cumulative_token_ids")


@every_release
def test_a_completion_without_ids_has_none() -> None:
    """The attribute is missing where it was not given, as on upstream's class."""
    from omni_fastpath.patches.lean_processing import completions

    bare = completions._Completion(0, "", [], None, None)
    assert not hasattr(bare, "cumulative_token_ids")
    assert not hasattr(completions._Completion, "cumulative_token_ids")


# ---- Latencies ----


@every_release
def test_the_mean_is_upstreams_to_the_last_digit() -> None:
    """The same sum in the same order, made when the record is taken out."""
    from omni_fastpath.patches.lean_processing.latencies import Records

    records, samples = Records(), [0.1 * n / 7 for n in range(1000)]
    record = records.setdefault("r", {"vllm_itls_ms": [], "vllm_itl_ms": 0.0})
    for each in samples:
        shown = record.setdefault("vllm_itls_ms", [])
        shown.append(each)
        assert list(shown) == [each]
    taken = records.pop("r", {})
    assert taken == {"vllm_itls_ms": samples, "vllm_itl_ms": sum(samples) / 1000.0}
    assert type(taken["vllm_itls_ms"]) is list
    assert records.pop("r", {}) == {}
    with pytest.raises(KeyError):
        records.pop("r")


# ---- On and off ----


@every_release
def test_requests_in_flight_outlive_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken off in the middle of a request, it ends as on stock; requests that come later are upstream's own."""
    from vllm.v1.engine import FinishReason
    from vllm_omni.engine import OmniEngineCoreOutput

    from omni_fastpath.patches.lean_processing.upstream import OmniRequestState

    def run(*, on: bool) -> list[Any]:
        play = Play(Setting(0), monkeypatch)
        play.orchestrator._stat_logger = play.statistics
        if on:
            with switched_on():
                play.add("r")
                _talk(play)
        else:
            play.add("r")
            _talk(play)
        _talk(play)
        asyncio.run(play.step(1, OmniEngineCoreOutput("r", [7], finish_reason=FinishReason.STOP)))
        play.add("later")
        assert type(play.pipeline.pools[1].output_processor.request_states["later"]) is OmniRequestState
        return [everything(each) for each in (*play.pipeline.messages(), *play.held)]

    assert run(on=True) == run(on=False)


@every_release
def test_requests_that_were_there_before_stay_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put on in the middle of a request, it changes nothing of it, and its latencies are all there."""
    from vllm.v1.engine import FinishReason
    from vllm_omni.engine import OmniEngineCoreOutput

    def run(*, on: bool) -> list[Any]:
        play = Play(Setting(0), monkeypatch)
        play.add("r")
        _talk(play)
        end = OmniEngineCoreOutput("r", [7], finish_reason=FinishReason.STOP)
        if on:
            with switched_on() as counters:
                play.add("later")
                _talk(play)
                asyncio.run(play.step(1, end))
                assert counters["not_built"] == 0
        else:
            play.add("later")
            _talk(play)
            asyncio.run(play.step(1, end))
        return [everything(each) for each in (*play.pipeline.messages(), *play.held)]

    assert run(on=True) == run(on=False)


def test_the_clock_of_these_tests_goes_on_at_each_look() -> None:
    """Who looks more often than upstream gets other times."""
    clock = Clock()
    assert clock.time() < clock.monotonic() < clock.perf_counter()
