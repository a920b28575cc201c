"""The real scheduler of one async-chunk stage in this process, with its adapter, connector and save thread.

Real are upstream's scheduler, ``OmniChunkTransferAdapter``, input processor and ``SharedMemoryConnector``, made from
the config that a stage of the simulated deploy gets. Only the worker behind them is ours: the simulated device, a clock
that answers with outputs of real size. There is no engine core around it: `Rig.step` is one turn of its loop.

    configs = stage_configs(folder)          # once, in a process of its own; some 20 s
    with Rig(configs[0]) as rig:             # 0: thinker, 1: talker; install patches before
        rig.add("a", tokens=20)
        rig.run()                            # or rig.step(), or rig.schedule() / rig.execute() / rig.update()
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.rigs.engine_requests import engine_request

STAGES = {0: "thinker", 1: "talker"}
"""Stages of Qwen3-Omni that send chunks, by number."""

PROMPT_TOKENS = 16
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)


# ---- Configs ----


def stage_configs(folder: Path) -> dict[int, Path]:
    """Pickled ``VllmConfig`` of each stage of the simulated Qwen3-Omni deploy, made in *folder* unless they are there.

    In a process of its own: vLLM's platform is chosen once a process, and this one's may be another. A server hands the
    config to its stages in the same form.

    Raises:
        RuntimeError: They could not be made; the message has the output.
    """
    found = {stage: folder / f"stage{stage}.pickle" for stage in STAGES}
    if not all(path.exists() for path in found.values()):
        from benchmarks.rigs.arm import clean
        from benchmarks.rigs.server import OFFLINE  # here, so that a fork of this module has nothing of ours

        environment = {**clean(), "OMNI_SIMULATED_DEVICE": "1", **OFFLINE}
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.save_queue.rig", str(folder)]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return found


def _write_configs(folder: Path) -> None:
    """Resolve the deploy YAML and build the configs, as ``vllm serve --omni --headless`` does for one stage."""
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.engine.stage_init_utils import (
        build_vllm_config,
        get_stage_connector_spec,
        load_omni_transfer_config_for_model,
        prepare_engine_environment,
    )

    import omni_simulated_device
    from omni_simulated_device.models import write_qwen3_omni

    model = str(folder / "model")
    write_qwen3_omni(Path(model))
    deploy = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni.yaml"
    resolved = resolve_omni_config(
        model,
        trust_remote_code=True,
        cli_overrides={},
        deploy_config_path=str(deploy),
        stage_overrides=None,
        strategy_config_path=None,
    )
    prepare_engine_environment()
    transfer = load_omni_transfer_config_for_model(model, resolved.config_path)
    for stage in STAGES:
        spec = get_stage_connector_spec(omni_transfer_config=transfer, stage_id=stage, async_chunk=True)
        config, _ = build_vllm_config(resolved.stage_by_id(stage), model, stage_connector_spec=spec)
        (folder / f"stage{stage}.pickle").write_bytes(pickle.dumps(config))


# ---- The rig ----


@dataclass(frozen=True)
class Step:
    """A scheduled step whose output is not taken yet."""

    scheduled: Any
    """Upstream's scheduler output."""
    output: Callable[[], Any]
    """Waits until the device is done and returns the model runner's output."""


class Rig:
    """One stage; a context manager.

    Args:
        config: A file of `stage_configs`.
        step_ms: What a step of the device takes, milliseconds.
        max_num_seqs: Requests that run at a time.
        kv_cache_mib: Pretended KV cache, MiB; 2 MiB hold some 1000 tokens of the one pretended layer.
        async_scheduling: As in the deploy (on) unless given.
        device_type: What the config calls its device; the simulated one's is ``cpu``, where the patch must copy what
            waits. ``cuda`` makes the stage a GPU stage for the patch.
    """

    def __init__(
        self,
        config: Path,
        *,
        step_ms: float = 0.0,
        max_num_seqs: int = 128,
        kv_cache_mib: int = 8192,
        async_scheduling: bool | None = None,
        device_type: str = "cpu",
    ) -> None:
        import vllm_omni  # noqa: F401 - replaces vLLM's Request before anything takes it
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_kv_cache_configs,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config = pickle.loads(config.read_bytes())  # noqa: S301 - our own file
        scheduling = vllm_config.scheduler_config
        scheduling.max_num_seqs = max_num_seqs
        vllm_config.device_config.device_type = device_type
        if async_scheduling is not None and async_scheduling != scheduling.async_scheduling:
            scheduling.async_scheduling = async_scheduling
            name = "OmniARAsyncScheduler" if async_scheduling else "OmniARScheduler"
            scheduling.scheduler_cls = f"vllm_omni.core.sched.omni_ar_scheduler.{name}"
        self.stage = int(vllm_config.model_config.stage_id)
        self.vllm_config = vllm_config
        self.runner = _runner(vllm_config, step_ms)
        register_all_kvcache_specs(vllm_config)
        worker = _worker(vllm_config)
        specs = worker.get_kv_cache_spec()
        resolve_kv_cache_layout(vllm_config, [worker.get_supported_kv_cache_layouts()], list(specs.values()))
        kv_cache = generate_scheduler_kv_cache_config(
            get_kv_cache_configs(vllm_config, [specs], [kv_cache_mib * 2**20])
        )
        vllm_config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, vllm_config)
        self.scheduler = scheduling.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(vllm_config),
            include_finished_set=True,
            log_stats=False,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        self.adapter = self.scheduler.chunk_transfer_adapter
        self.connector = self.adapter.connector
        self.depth = int(vllm_config.max_concurrent_batches)
        """Steps in flight: 2 with async scheduling."""
        self.in_flight: deque[Step] = deque()
        self._feeder: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the adapter's threads and remove what this stage put into shared memory and nobody fetched."""
        self.adapter.shutdown()
        for thread in (self.adapter.save_thread, self.adapter.recv_thread):
            thread.join(timeout=5)
        self.connector.close()  # what the last send put after the adapter had closed it
        if self._feeder is not None:  # or it removes, when it is collected, a later rig's segments of the same names
            self._feeder.close()

    # ---- Requests ----

    def add(
        self,
        request_id: str,
        *,
        tokens: int,
        external_req_id: str | None = None,
        prompt: str | None = None,
        prompt_tokens: int = PROMPT_TOKENS,
        **fields: Any,
    ) -> Any:
        """Add a request that samples exactly *tokens* tokens (frames at the talker) and return upstream's object.

        The answer follows from the last letters of *prompt*, by default the external request id.
        A talker's request gets its whole input now, through shared memory, as from a thinker that has ended.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = external_req_id or request_id
        if self.adapter.receives_chunks:
            self._feed(name, prompt or name, prompt_tokens, tokens)
        request = Request.from_engine_core_request(
            engine_request(
                name,
                [64 + ord(letter) % 26 for letter in f"{prompt or name:>{prompt_tokens}}"[-prompt_tokens:]],
                SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
                request_id=request_id,
                **fields,
            ),
            None,
        )
        # As StageEngineCoreProc.preprocess_add_request, which sets these on whatever class vLLM made.
        request.external_req_id, request.payload_sender_info = name, None
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request, as when its client goes away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _feed(self, name: str, prompt: str, prompt_tokens: int, text_tokens: int) -> None:
        """Send the chunk of a thinker whose text has ended."""
        import torch
        from vllm_omni.data_entry_keys import EmbeddingsStruct, MetaStruct, OmniPayloadStruct
        from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

        from omni_simulated_device import content

        sender = self.stage - 1
        if self._feeder is None:  # another sender than the stage's own, whose books must not have these chunks
            self._feeder = SharedMemoryConnector({"stage_id": sender})
        tags = content.encode_tags(content.content_key(0, prompt), range(prompt_tokens), text_tokens)
        rows = torch.zeros(prompt_tokens, 2048, dtype=torch.bfloat16)
        rows[:, : content.ROW_BYTES] = torch.from_numpy(tags.copy())
        chunk = OmniPayloadStruct(
            embed=EmbeddingsStruct(prefill=rows), meta=MetaStruct(finished=torch.tensor(data=True))
        )
        sent, _, _ = self._feeder.put(str(sender), str(self.stage), f"{name}_{sender}_0", chunk)
        assert sent, f"the talker's input {name} could not be put into shared memory"

    # ---- Steps ----

    def schedule(self) -> Any:
        """Upstream's schedule; its output says which requests are in the step."""
        return self.scheduler.schedule()

    def execute(self, scheduled: Any) -> Step:
        """Start a scheduled step on the device and put it in flight."""
        output = self.runner.execute_model(scheduled)
        if output is None:
            output = self.runner.sample_tokens()
        waits = getattr(output, "get_output", None)
        step = Step(scheduled, lambda: output if waits is None else waits())
        self.in_flight.appendleft(step)
        return step

    def update(self) -> Any:
        """Wait for the oldest step in flight and give its output to the scheduler, which queues save tasks."""
        step = self.in_flight.pop()
        return self.scheduler.update_from_output(step.scheduled, step.output())

    def step(self, tokens: Counter[str] | None = None) -> bool:
        """One turn of the engine core's loop (``step_with_batch_queue`` or ``step``); whether anything was computed.

        Args:
            tokens: Where tokens that come out are counted, by request id.
        """
        executed = False
        if self.scheduler.has_requests():
            scheduled = self.schedule()
            executed = bool(scheduled.total_num_scheduled_tokens > 0)
            self.execute(scheduled)
            if len(self.in_flight) < self.depth and (executed or self.scheduler.has_requests()):
                return executed
        elif not self.in_flight:
            return False
        came = self.update()
        if tokens is not None:
            for outputs in (came or {}).values():
                tokens.update({each.request_id: len(each.new_token_ids) for each in outputs.outputs})
        return executed

    def turn(self, tokens: Counter[str] | None = None) -> bool:
        """A step, and the pause that upstream's loop makes when nothing could be computed."""
        executed = self.step(tokens)
        if not executed and self.scheduler.has_unfinished_requests():
            time.sleep(0.001)
        return executed

    def run(self, timeout_s: float = 60.0) -> None:
        """Step until no request is left and every save task is sent.

        Raises:
            TimeoutError: That took longer.
        """
        deadline = time.monotonic() + timeout_s
        while self.busy() or outstanding(self.adapter):
            if time.monotonic() > deadline:
                left = len(self.adapter._pending_save_reqs)
                raise TimeoutError(f"{len(self.scheduler.requests)} requests and {left} save tasks are left")
            if self.busy():
                self.turn()
            else:
                time.sleep(0.001)

    def busy(self) -> bool:
        """Whether a request or a step is left."""
        return bool(self.in_flight) or bool(self.scheduler.has_requests())


def _runner(vllm_config: Any, step_ms: float) -> Any:
    """The simulated model runner, with steps of this length."""
    from omni_simulated_device import config
    from omni_simulated_device.worker import SimulatedModelRunner

    return SimulatedModelRunner(vllm_config, config.load(json.dumps({"stages": {"*": {"base_ms": step_ms}}})))


def _worker(vllm_config: Any) -> Any:
    """The simulated worker as far as it is asked for its pretended cache; it has no device."""
    from omni_simulated_device.worker import SimulatedARWorker

    worker = object.__new__(SimulatedARWorker)
    worker.cache_config = vllm_config.cache_config
    return worker


# ---- What is on its way ----


def outstanding(adapter: Any) -> bool:
    """Whether a save task is queued or being sent."""
    in_flight = any(token.in_flight for token in list(adapter._sender_tokens.values()))
    return in_flight or len(adapter._pending_save_reqs) > 0


def shared_memory(name: str) -> list[Path]:
    """Files in shared memory of streams whose external request id begins with *name*, lock files included."""
    return [path for path in _SHARED_MEMORY.iterdir() if path.name.removeprefix("shm_").startswith(name)]


if __name__ == "__main__":
    _write_configs(Path(sys.argv[1]))
