"""Beside what else upstream does with running requests: where no stream may be held, the state says so."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_fastpath.declare import State
from tests.patches.soak_stage import PATIENCE_S, Gate, entry, patched, slow_down, unique, until

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Configs of the simulated deploy's stages; made once."""
    from benchmarks.save_queue.rig import stage_configs

    return stage_configs(tmp_path_factory.mktemp("stages"))


def changed(config: Path, folder: Path, change: Callable[[Any], None]) -> Path:
    """The config with something else switched on."""
    import vllm_omni  # noqa: F401 - before anything of vLLM's is unpickled

    vllm_config = pickle.loads(config.read_bytes())  # noqa: S301 - our own file
    change(vllm_config)
    found = folder / "changed.pickle"
    found.write_bytes(pickle.dumps(vllm_config))
    return found


def add(rig: Any, name: str, tokens: int, *, information: Any = None, lora: Any = None) -> Any:
    """Add a request with an adapter, or with additional information."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from benchmarks.rigs.engine_requests import engine_request

    rig.external_ids.add(name)
    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    wanted = engine_request(name, [65 + n for n in range(16)], parameters, request_id=name)
    wanted.lora_request = lora
    request = Request.from_engine_core_request(wanted, None)
    request.external_req_id, request.payload_sender_info = name, None
    if information is not None:
        request.additional_information = information
    rig.scheduler.add_request(request)
    return request


def run(rig: Any) -> int:
    """Run to the end; the most adapters that were in one step."""
    most, deadline = 0, time.monotonic() + PATIENCE_S
    while rig.busy():
        assert time.monotonic() < deadline
        rig.turn()
        adapters = {each.lora_request.lora_int_id for each in rig.scheduler.running if each.lora_request}
        most = max(most, len(adapters))
    return most


def test_lora_streams_are_not_held(configs: dict[int, Path], tmp_path: Path) -> None:
    """One adapter at a time: were its stream held, vLLM would admit the next one's and die when both run again."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest

    from benchmarks.save_queue.rig import Rig

    def change(config: Any) -> None:
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1)

    path = changed(configs[0], tmp_path, change)
    with patched(per_stream_tasks=3, holds="always") as counters, Rig(path, max_num_seqs=8) as rig:
        assert entry().state is State.APPLIED
        assert "no stream is held: LoRA" in entry().reason
        gate = Gate(rig.adapter.connector)
        names = [unique(f"lora{n}") for n in range(2)]
        gate.shut(*names)
        for number, name in enumerate(names):
            add(rig, name, 40, lora=LoRARequest(str(number), number + 1, str(tmp_path)))
        assert run(rig) == 1
        assert counters["max_stream_tasks"] >= 30  # a credit of 3, and nobody was held
        assert counters["holds"] == 0
        gate.open()


def test_coupled_streams_are_not_held(configs: dict[int, Path], tmp_path: Path) -> None:
    """Two branches of one request run in the same steps or upstream raises; slow sends do not change that."""
    from vllm_omni.engine.serialization import serialize_additional_information
    from vllm_omni.model_executor.stage_input_processors import breeze_tts_2

    from benchmarks.save_queue.rig import Rig

    def change(config: Any) -> None:
        scheduling = config.scheduler_config
        scheduling.async_scheduling = scheduling.enable_chunked_prefill = False
        scheduling.scheduler_cls = "vllm_omni.core.sched.omni_cfg_ar_scheduler.OmniCFGARScheduler"
        scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = 2 * config.model_config.max_model_len
        config.cache_config.enable_prefix_caching = False
        config.additional_config = {"cfg_prefill_delay_tokens": 0}

    path = changed(configs[0], tmp_path, change)
    with (
        patched(per_stream_tasks=3, holds="always") as counters,
        Rig(path, max_num_seqs=4, async_scheduling=None) as rig,
    ):
        assert "no stream is held: OmniCFGARScheduler was not read for it" in entry().reason
        processor = rig.adapter.custom_process_next_stage_input_func

        def only_the_first_branch(request: Any, **rest: Any) -> Any:
            is_companion = request.external_req_id.endswith(breeze_tts_2.CFG_UNCOND_SUFFIX)
            return None if is_companion else processor(request=request, **rest)

        rig.adapter.custom_process_next_stage_input_func = only_the_first_branch
        slow_down(rig.adapter.connector, 0.002)
        name, suffix = unique("pair"), breeze_tts_2.CFG_UNCOND_SUFFIX
        for each, role in ((name, "cond"), (name + suffix, "uncond")):
            group = serialize_additional_information({"cfg_group": {"role": role, "uncond_suffix": suffix}})
            add(rig, each, 60, information=group)
        run(rig)
        assert counters["holds"] == 0
        until(lambda: not rig.adapter._pending_save_reqs)


def scheduler(kind: str = "OmniARScheduler", **config: Any) -> Any:
    """A scheduler of that class with this in its config."""
    from vllm_omni.core.sched import omni_ar_scheduler
    from vllm_omni.model_executor.models.voxcpm2.scheduler import VoxCPM2OmniARAsyncScheduler

    kinds = {**vars(omni_ar_scheduler), "VoxCPM2OmniARAsyncScheduler": VoxCPM2OmniARAsyncScheduler}
    made = kinds[kind].__new__(kinds[kind])
    defaults = {"parallel_config": SimpleNamespace(pipeline_parallel_size=1)}
    made.vllm_config = SimpleNamespace(**{**defaults, **config})
    made.current_step = 0
    return made


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("OmniARScheduler", {}, None),
        ("OmniARAsyncScheduler", {}, None),
        ("VoxCPM2OmniARAsyncScheduler", {}, "was not read"),
        ("OmniARScheduler", {"lora_config": object()}, "LoRA"),
        ("OmniARScheduler", {"speculative_config": object()}, "speculative"),
        ("OmniARScheduler", {"kv_transfer_config": object()}, "KV cache is transferred"),
        (
            "OmniARScheduler",
            {"model_config": SimpleNamespace(omni_kv_config={"need_send_cache": True})},
            "KV cache is transferred",
        ),
        ("OmniARScheduler", {"model_config": SimpleNamespace(omni_kv_config={})}, None),
        ("OmniARScheduler", {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline"),
    ],
)
def test_only_what_was_read_is_held(kind: str, config: dict[str, Any], says: str | None) -> None:
    """Limits are for schedulers and features that were read for them, by exact class."""
    from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
    from omni_fastpath.patches.save_queue_cap.holdable import obstacle_to_holds

    found = obstacle_to_holds(scheduler(kind, **config), SaveQueueOptions())
    assert (found is None) if says is None else (found is not None and says in found)


def test_pairs_that_a_patched_scheduler_keeps_together_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's pairing of requests wraps vLLM's scheduler before it is made; who is held would leave its partner."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
    from omni_fastpath.patches.save_queue_cap.holdable import obstacle_to_holds

    def paired(self: Any, throttle_prefills: bool = False) -> Any:
        raise NotImplementedError

    paired._cfg_pairing_patched = True  # type: ignore[attr-defined]  # upstream's mark
    monkeypatch.setattr(Scheduler, "schedule", paired)
    assert "pairs" in (obstacle_to_holds(scheduler(), SaveQueueOptions()) or "")


@pytest.mark.parametrize(
    ("holds", "limits"),
    [
        ("never", set()),
        ("bytes", {"total_bytes"}),
        ("always", {"per_stream_tasks", "total_tasks", "total_bytes"}),
    ],
)
def test_holds_says_which_limits_hold(holds: str, limits: set[str]) -> None:
    """Only those; the others still say who is served by itself."""
    from omni_fastpath.patches.save_queue_cap import SaveQueueOptions
    from omni_fastpath.patches.save_queue_cap.credits import limits_of

    assert set(limits_of(SaveQueueOptions.model_validate({"holds": holds}))) == limits
    assert SaveQueueOptions().holds == "bytes"


def test_hung_receiver_does_not_stop_text(configs: dict[int, Path]) -> None:
    """By default the text of everybody goes on while two streams' puts hang: their own and a text-only request's."""
    from vllm_omni.engine.serialization import serialize_additional_information

    from benchmarks.save_queue.rig import Rig

    with patched() as counters, Rig(configs[0], max_num_seqs=16) as rig:
        gate = Gate(rig.adapter.connector)
        names = [unique(f"audio{n}") for n in range(4)]
        gate.shut(*names[:2])
        for name in names:
            rig.add(name, tokens=200)
        text = unique("text")
        add(rig, text, 200, information=serialize_additional_information({"omni_final_stage_id": 0}))
        run(rig)  # every token of everybody
        assert gate.inside
        assert counters["holds"] == 0
        gate.open()
        until(lambda: not rig.adapter._pending_save_reqs and not gate.inside)
