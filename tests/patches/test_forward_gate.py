"""``forward_gate`` on the real scheduler, connector, encoder, decoder, output processor and orchestrator."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.declare import Process, State
from tests.patches.drive import only

pytestmark = pytest.mark.upstream

TALKER = 1


def gated() -> AbstractContextManager[Any]:
    """The patch installed as in a stage process; its entry in the ledger."""
    return only("forward_gate", process=Process.STAGE)


@pytest.fixture
def gate() -> Iterator[Any]:
    """The patch installed as in a stage process; its entry in the ledger."""
    with gated() as entry:
        yield entry


def play(rig: Any, enough: Callable[[Any], bool] | None = None) -> list[Any]:
    """Run the rig until nothing is left, or until an output is enough; every raw output, as it leaves the scheduler."""
    update, found = rig.update, []

    def recorded() -> Any:
        outputs = update()
        found.extend(outputs.values())
        return outputs

    rig.update = recorded
    if enough is None:
        rig.run()
    while enough is not None and not any(enough(output) for raw in found for output in raw.outputs):
        rig.turn()
    return found


def by_request(raws: Sequence[Any]) -> dict[str, list[Any]]:
    """Each request's outputs, in order."""
    found = defaultdict(list)
    for raw in raws:
        for output in raw.outputs:
            found[output.request_id].append(output)
    return dict(found)


def wire(raw: Any) -> Any:
    """A raw output as the orchestrator decodes it."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm_omni.engine import OmniEngineCoreOutputs

    frames = [bytearray(frame) for frame in MsgpackEncoder().encode(raw)]  # writable, as zmq's
    return MsgpackDecoder(OmniEngineCoreOutputs).decode(frames)


def without_payload(output: Any) -> list[Any]:
    """An output but for its payload; 0.28 has not all of it."""
    said = ("new_token_ids", "finish_reason", "stop_reason", "num_generation_tokens", "is_segment_finished")
    found = [getattr(output, name, None) for name in (*said, "kv_transfer_params", "pooling_output")]
    return [*found, repr(getattr(output, "prefill_stats", None))]


# ---- What is taken out, and what is not ----


def test_list_is_recognised_after_pickling(gate: Any) -> None:
    """One list for two fields stays one in the runner's pickle; one that was filtered for the client is another."""
    from vllm_omni.outputs import OmniModelRunnerOutput

    from omni_fastpath.patches.forward_gate import wrappers

    both = [{"codes.audio": 1}]
    output = OmniModelRunnerOutput(
        req_ids=["a"], req_id_to_index={"a": 0}, multimodal_outputs=both, inter_stage_outputs=both
    )
    scheduler, step = SimpleNamespace(requests={}), SimpleNamespace(num_scheduled_tokens={"a": 1})
    for each in (output, pickle.loads(pickle.dumps(output, pickle.HIGHEST_PROTOCOL))):  # noqa: S301
        assert wrappers._kept_in_step(scheduler, step, each) == frozenset()
    output.multimodal_outputs = list(both)
    assert wrappers._kept_in_step(scheduler, step, output) is None


@pytest.mark.every_release
def test_gate_leaves_all_but_the_payload(tmp_path: Path) -> None:
    """On each release: the orchestrator gets the same outputs without the payload, the next stage the same chunks."""
    from omni_fastpath.install import row_here
    from tests.patches.small_stage import SmallStage, stage_config

    config = stage_config(tmp_path)

    def played() -> tuple[dict[str, list[Any]], Any]:
        with SmallStage(config, device="cpu") as stage:
            for name, tokens in (("a", 12), ("b", 20), ("c", 7)):
                stage.add(name, tokens=tokens)
            stage.run()
        return stage.outputs, stage.chunks

    def keys(outputs: list[Any]) -> list[Any]:
        return [each.multimodal_output and sorted(each.multimodal_output) for each in outputs]

    stock, chunks_of_stock = played()
    with gated() as entry:
        row = row_here(entry.patch)
        assert row is not None
        ours, chunks_of_ours = played()
        assert (entry.state, "preview" in entry.reason) == (State.APPLIED, row.preview), entry.reason
        counted = entry.counters["multimodal_outputs"]
    assert chunks_of_ours == chunks_of_stock
    assert ours.keys() == stock.keys()
    for name, outputs in stock.items():
        assert [without_payload(each) for each in ours[name]] == [without_payload(each) for each in outputs]
        assert keys(outputs) == [each and ["codes.audio", "sr"] for each in keys(outputs)]
        assert keys(ours[name]) == [each and ["sr"] for each in keys(outputs)]
    assert counted == sum(each is not None for outputs in stock.values() for each in keys(outputs)) > 30


# ---- Left alone: each with whom it would be missed by ----


def deliver(pipeline: Any, raws: Sequence[Any]) -> None:
    """Let the orchestrator dispatch the talker's raw outputs."""
    with pipeline:
        pipeline.put(TALKER, *(wire(raw) for raw in raws))
        pipeline.settle()
    assert pipeline.crash is None


def payload_of(output: Any) -> set[str]:
    """The keys of a processed output's payload."""
    found = getattr(output.outputs[0], "multimodal_output", None)
    return set(found or ())


def cfg_companion(rig: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A companion's output, which is bundled with its parent's."""
    from benchmarks.rigs.inprocess import Pipeline

    name = "a__cfg_uncond"
    rig.add(name, tokens=3)
    pipeline = Pipeline()
    pipeline.add_request(name)
    tracker = pipeline.orchestrator._cfg_tracker
    tracker.register_parent("a")
    tracker.register_companion("a", "uncond", name)
    found: set[str] = set()
    monkeypatch.setattr(tracker, "set_companion_output", lambda _id, output: found.update(payload_of(output)))
    deliver(pipeline, play(rig))
    return found


def last_segment(rig: Any, _monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The end of a session, whose request is no longer resumable: the processed outputs."""
    from benchmarks.rigs.inprocess import Pipeline

    request = rig.add("a", tokens=3, resumable=True)
    raws = play(rig)
    assert not request.resumable
    pipeline = Pipeline()
    pipeline.add_request("a")
    processor = pipeline.pools[TALKER].output_processor
    processed = [o for raw in raws for o in processor.process_outputs(wire(raw).outputs, 1.0).request_outputs]
    return set[str]().union(*(payload_of(output) for output in processed))


@pytest.mark.parametrize("forced", [False, True], ids=["judged", "forced"])
@pytest.mark.parametrize("case", [cfg_companion, last_segment])
def test_left_alone(
    case: Callable[..., set[str]], forced: bool, configs: dict[int, Path], gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the payload in the orchestrator gets it; made to gate everything, the patch would take it away."""
    from benchmarks.save_queue.rig import Rig
    from omni_fastpath.patches.forward_gate import wrappers

    if forced:
        monkeypatch.setattr(wrappers, "verdict", lambda _: (State.APPLIED, "forced"))
        monkeypatch.setattr(wrappers, "_needs_payload", lambda _: False)
    with Rig(configs[TALKER]) as rig:
        found = case(rig, monkeypatch)
    assert found == (set() if forced else {"codes"})


@pytest.mark.parametrize(
    ("said", "needs"),
    [({}, False), ({"pooling_params": object()}, True), ({"resumable": True}, True), ({"streaming_queue": []}, True)],
)
def test_whose_payload_is_left_alone(said: dict[str, Any], needs: bool) -> None:
    """A pooling request's user gets all of it; a session's segments have metadata that session plugins read."""
    from omni_fastpath.patches.forward_gate import wrappers

    plain = {"request_id": "a", "external_req_id": "a", "pooling_params": None, "resumable": False}
    assert wrappers._needs_payload(SimpleNamespace(**{**plain, "streaming_queue": None, **said})) is needs


# ---- Judging ----


def chunks(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> None:
    """An input processor that makes chunks."""


def scheduler(**changes: Any) -> Any:
    """As much of a talker's scheduler as is judged."""
    processor = changes.pop("processor", chunks)
    adapter = SimpleNamespace(custom_process_next_stage_input_func=processor)
    kv = changes.pop("kv_transfer_config", None)
    role = changes.pop("role", "receiver")
    model_config = SimpleNamespace(
        **{
            "stage_id": 1,
            "model_stage": "talker",
            "async_chunk": True,
            "use_v2_model_runner": False,
            "worker_type": "ar",
            "engine_output_type": "latent",
            "final_output": False,
            "session_mode": "turn",
            "stage_connector_config": {"extra": {"role": role} if role else {}},
            **changes,
        }
    )
    config = SimpleNamespace(model_config=model_config, kv_transfer_config=kv)
    return SimpleNamespace(vllm_config=config, chunk_transfer_adapter=adapter)


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, State.APPLIED, "what stage 1 (talker) sends to the next stage is not sent to the orchestrator as well"),
        ({"worker_type": None}, State.APPLIED, "what stage 1"),
        ({"async_chunk": False}, State.NOT_APPLICABLE, "runs without async-chunk"),
        ({"use_v2_model_runner": True}, State.NOT_APPLICABLE, "model runner v2"),
        ({"role": "sender"}, State.SUPERSEDED, "splits the payload"),
        ({"role": "sender", "final_output": True}, State.SUPERSEDED, "splits the payload"),
        ({"role": None}, State.SUPERSEDED, "splits the payload"),
        ({"role": None, "stage_id": 0}, State.NOT_APPLICABLE, "has no connector"),
        ({"final_output": True}, State.NOT_APPLICABLE, "is a final-output stage"),
        ({"engine_output_type": "audio"}, State.NOT_APPLICABLE, "makes audio"),
        ({"engine_output_type": "image"}, State.NOT_APPLICABLE, "makes image"),
        ({"worker_type": "generation"}, State.NOT_APPLICABLE, "worker type generation"),
        ({"session_mode": "duplex"}, State.NOT_APPLICABLE, "duplex sessions"),
        ({"kv_transfer_config": object()}, State.NOT_APPLICABLE, "PD prefill"),
        ({"processor": None}, State.NOT_APPLICABLE, "no processor that makes chunks"),
    ],
)
def test_verdict(changes: dict[str, Any], state: State, reason: str) -> None:
    """A stage is gated only if all holds, and says what does not."""
    from omni_fastpath.patches.forward_gate import wrappers

    found, why = wrappers.verdict(scheduler(**changes))
    assert found is state
    assert reason in why


def test_every_chunk_processor_of_upstreams_is_known() -> None:
    """Of all that upstream registers for async-chunk each is one that makes chunks; none for whole payloads is."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.stage_config import PipelineConfig

    from omni_fastpath.patches.forward_gate import wrappers

    stages = [s for p in OMNI_PIPELINES.values() if isinstance(p, PipelineConfig) for s in p.stages]
    makers = {s.async_chunk_process_next_stage_input_func for s in stages} - {None}
    others = {s.custom_process_next_stage_input_func for s in stages} - {None} - makers
    found: dict[str, bool] = {}
    for path in makers | others:
        try:
            processor = resolve_obj_by_qualname(path)
        except ImportError:  # a model's own package, or what stands in for torchaudio here
            continue
        found[path] = wrappers._makes_chunks(processor)
    assert {path for path in makers & found.keys() if not found[path]} == set()
    assert {path for path in others & found.keys() if found[path]} == set()
    assert len(makers & found.keys()) > 10
    assert others & found.keys()


# ---- Trouble ----


@pytest.mark.parametrize(
    "function", ["verdict", "partition_flat_payload", "_kept_in_step", "_needs_payload", "_gate_output"]
)
def test_error_while_gating_stops_the_gate_and_not_the_stage(
    function: str, configs: dict[int, Path], gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In judging the stage or in a step: all outputs still leave, whole, and the state says why."""
    from benchmarks.save_queue.rig import Rig
    from omni_fastpath.patches.forward_gate import wrappers

    monkeypatch.setattr(wrappers, function, lambda *_, **__: 1 // 0)
    with Rig(configs[TALKER]) as rig:
        rig.add("a", tokens=3)
        outputs = by_request(play(rig))["a"]
    assert gate.state is State.FAILED
    assert outputs[-1].finished
    assert any(output.multimodal_output for output in outputs)
    assert gate.counters["multimodal_outputs"] == 0
