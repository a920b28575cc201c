"""``forward_gate`` on the real scheduler, adapter and connector."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from omni_fastpath.declare import Process, State
from omni_fastpath.patches.forward_gate import wrappers
from tests.patches.drive import only

pytestmark = pytest.mark.upstream


@pytest.fixture
def gate() -> Iterator[Any]:
    """The patch installed as in a stage process; its entry in the ledger."""
    with only("forward_gate", process=Process.STAGE) as entry:
        yield entry


# ---- Which list is recognised ----


def test_list_is_recognised_after_pickling(gate: Any) -> None:
    """One list for two fields stays one list in the runner's pickle, and a filtered list is another one."""
    from vllm_omni.outputs import OmniModelRunnerOutput

    both = [{"codes.audio": 1}]
    output = OmniModelRunnerOutput(
        req_ids=["a"], req_id_to_index={"a": 0}, multimodal_outputs=both, inter_stage_outputs=both
    )
    talker, step = scheduler(), SimpleNamespace(num_scheduled_tokens={"a": 1})
    for each in (output, pickle.loads(pickle.dumps(output, pickle.HIGHEST_PROTOCOL))):  # noqa: S301
        assert wrappers._kept_in_step(talker, step, each) == frozenset()
    output.multimodal_outputs = list(both)
    assert wrappers._kept_in_step(talker, step, output) is None
    assert gate.state is State.SUPERSEDED


def test_what_has_no_payload_field_is_left_alone(gate: Any) -> None:
    """What vLLM returns for a step without tokens, and an output of vLLM's own class."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
    from vllm_omni.engine import OmniEngineCoreOutput

    scheduler, step = SimpleNamespace(requests={}), SimpleNamespace(num_scheduled_tokens={})
    assert wrappers._kept_in_step(scheduler, step, EMPTY_MODEL_RUNNER_OUTPUT) is None
    wrappers._gate_output(OmniEngineCoreOutput.__base__("a", []))
    assert gate.counters["multimodal_outputs"] == 0


# ---- Payloads that are kept ----


@pytest.mark.parametrize(
    ("said", "needs"),
    [
        ({}, False),
        ({"pooling_params": object()}, True),
        ({"resumable": True}, True),
        ({"streaming_queue": []}, True),
        ({"request_id": "a__cfg_uncond"}, True),
        ({"external_req_id": "a__cfg_uncond"}, True),
    ],
)
def test_whose_payload_is_left_alone(said: dict[str, Any], needs: bool) -> None:
    """The payload of a pooling request, of a session and of a companion is kept, because something else receives it."""
    plain = {"request_id": "a", "external_req_id": "a", "pooling_params": None, "resumable": False}
    assert wrappers._needs_payload(SimpleNamespace(**{**plain, "streaming_queue": None, **said})) is needs


# ---- Judging ----


def chunks(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> None:
    """An input processor that makes chunks."""


def scheduler(**changes: Any) -> Any:
    """As much of a talker's scheduler as the verdict reads."""
    adapter = SimpleNamespace(custom_process_next_stage_input_func=changes.pop("processor", chunks))
    kv, role = changes.pop("kv_transfer_config", None), changes.pop("role", "receiver")
    stage = {"stage_id": 1, "model_stage": "talker", "worker_type": "ar", "engine_output_type": "latent"}
    modes = {"async_chunk": True, "use_v2_model_runner": False, "final_output": False, "session_mode": "turn"}
    connector = {"extra": {"role": role} if role else {}}
    model_config = SimpleNamespace(**{**stage, **modes, "stage_connector_config": connector, **changes})
    config = SimpleNamespace(model_config=model_config, kv_transfer_config=kv)
    found = type("Scheduler", (), {})()  # it can be referred to weakly
    vars(found).update(vllm_config=config, chunk_transfer_adapter=adapter, requests={})
    return found


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, State.APPLIED, "what stage 1 (talker) sends to the next stage is not sent to the orchestrator as well"),
        ({"async_chunk": False}, State.NOT_APPLICABLE, "runs without async-chunk"),
        ({"use_v2_model_runner": True}, State.NOT_APPLICABLE, "model runner v2"),
        ({"role": "sender"}, State.SUPERSEDED, "splits the payload"),
        ({"role": None}, State.SUPERSEDED, "splits the payload"),
        ({"role": None, "stage_id": 0}, State.NOT_APPLICABLE, "has no connector"),
        ({"final_output": True}, State.NOT_APPLICABLE, "is a final-output stage"),
        ({"engine_output_type": "audio"}, State.NOT_APPLICABLE, "makes audio"),
        ({"worker_type": "generation"}, State.NOT_APPLICABLE, "worker type generation"),
        ({"session_mode": "duplex"}, State.NOT_APPLICABLE, "duplex sessions"),
        ({"kv_transfer_config": object()}, State.NOT_APPLICABLE, "PD prefill"),
        ({"processor": None}, State.NOT_APPLICABLE, "makes no chunks"),
    ],
)
def test_verdict(changes: dict[str, Any], state: State, reason: str) -> None:
    """A stage is gated only if every condition is met, and the reason names the one that is not."""
    found, why = wrappers.verdict(scheduler(**changes))
    assert found is state
    assert reason in why


def test_every_chunk_processor_of_upstream_is_known() -> None:
    """All processors that upstream registers for async-chunk make chunks, and no processor of whole payloads does."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.config.stage_config import PipelineConfig

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
    assert {path for path, makes in found.items() if makes != (path in makers)} == set()
    assert len(makers & found.keys()) > 10
    assert others & found.keys()
