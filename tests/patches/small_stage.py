"""A stage of whatever release is first on ``PYTHONPATH``: its real scheduler, adapter, connector and save thread.

Only the runner behind them is a fake. For each request of a step it makes one token, and a payload of how many tokens
the request has sampled before, so that the expected content of each chunk is known. The stage is the first of its
pipeline, so that it needs no chunks.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import Self

PROMPT = [1, 2, 3, 4]
PATIENCE_S = 30.0
"""A guard; no test measures it."""

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where upstream's connector keeps its chunks)


def send_codes(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> Any:
    """An input processor that sends what was queued, keeping nothing."""
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    if multimodal_output is None:
        return None
    return OmniPayloadStruct(codes=CodesStruct(audio=multimodal_output["codes"]["audio"]))


def stage_config(folder: Path) -> Any:
    """A ``VllmConfig`` of a tiny model, with what vLLM-Omni's stages have besides.

    Args:
        folder: Where the model's own configuration is written.
    """
    import vllm_omni  # noqa: F401 - replaces vLLM's Request before anything takes it
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    # A class is looked at here; its name alone would be in a process that imports vLLM again.
    ModelRegistry.register_model("SmallForCausalLM", Qwen3ForCausalLM)
    model = {"architectures": ["SmallForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", "vocab_size": 1000}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(model | sizes | heads))
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, "max_model_len": 4096}
    kind = "vllm_omni.core.sched.omni_ar_scheduler.OmniARAsyncScheduler"
    scheduler: dict[str, Any] = {"async_scheduling": True, "scheduler_cls": kind}
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096),
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, enable_chunked_prefill=True, **limits, **scheduler),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = 4096
    stage = {"stage_id": 0, "model_stage": "talker", "worker_type": "ar", "engine_output_type": "latent"}
    modes = {"async_chunk": True, "use_v2_model_runner": False, "final_output": False, "omni_kv_config": None}
    sends = {"custom_process_next_stage_input_func": f"{__name__}.send_codes", "active_stream_window": 0}
    # As a middle stage's: its connector is that of its incoming edge.
    connector = {"name": "SharedMemoryConnector", "extra": {"role": "receiver", "stage_id": 0}}
    for name, value in {**stage, **modes, **sends, "stage_connector_config": connector, "max_num_seqs": 16}.items():
        setattr(config.model_config, name, value)
    return config


class SmallStage:
    """One stage; a context manager.

    Args:
        config: Of `stage_config`.
        device: What kind of device the payloads come from. On "cpu" they are a buffer that a later step overwrites.
        blocks: Of KV cache, 16 tokens each.
        codes: Numbers in a payload.
        lag: Steps that are scheduled before the first one's result is taken in.
    """

    def __init__(self, config: Any, *, device: str = "cuda", blocks: int = 4096, codes: int = 2, lag: int = 0) -> None:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config.device_config.device_type = device
        rows = config.scheduler_config.max_num_seqs
        self._buffers = deque(torch.zeros(rows, codes, dtype=torch.int64) for _ in range(1 + lag))
        self._lag, self._is_overwritten = lag, device == "cpu"
        self._in_flight: deque[Any] = deque()
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
        known = inspect.signature(Scheduler.__init__).parameters
        wanted = {"hash_block_size": 16, "block_size": 16, "include_finished_set": True, "log_stats": False}
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            **{name: value for name, value in wanted.items() if name in known},
        )
        self.adapter = self.scheduler.chunk_transfer_adapter
        self.queue = self.adapter._pending_save_reqs
        self.open = threading.Event()
        """Cleared, no chunk gets into the connector."""
        self.open.set()
        self.chunks: dict[str, list[tuple[str, list[int], bool]]] = defaultdict(list)
        """What the next stage gets, by stream in order: key, codes, whether it is the last."""
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        """What the orchestrator gets, by request in order."""
        self._put = self.adapter.connector.put
        self.adapter.connector.put = self._noted
        self._made = Counter[str]()  # payloads
        self.streams: set[str] = set()
        """Those that may have something in shared memory."""
        self._aborted: set[str] = set()

    def _noted(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        assert self.open.wait(PATIENCE_S)
        codes = None if data.codes is None or data.codes.audio is None else data.codes.audio.flatten().tolist()
        self.chunks[put_key.rsplit("_", 2)[0]].append((put_key, codes or [], bool(data.meta.finished)))
        return self._put(from_stage=from_stage, to_stage=to_stage, put_key=put_key, data=data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self.adapter.shutdown()
        for thread in (self.adapter.save_thread, self.adapter.recv_thread):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), f"{thread.name} still waits after the end"
        # The thread may have put after `shutdown` closed it. `__del__` removes that by name, and a later stage has it.
        self.adapter.connector.close()
        for stream in self.streams:
            for path in self.segments(stream):
                path.unlink(missing_ok=True)

    def segments(self, stream: str) -> list[Path]:
        """Files in shared memory of a stream, lock files included."""
        return [path for path in _SHARED_MEMORY.iterdir() if path.name.removeprefix("shm_").startswith(f"{stream}_")]

    # ---- Requests ----

    def add(self, name: str, *, tokens: int, **fields: Any) -> Any:
        """Add a request that samples so many tokens; upstream's object. Its stream is unique in shared memory."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id=name,
            prompt_token_ids=PROMPT,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            pooling_params=None,
            **fields,
        )
        request.external_req_id, request.payload_sender_info = self.stream(name), None
        self.streams.add(request.external_req_id)
        self.scheduler.add_request(request)
        return request

    def add_all(self, tokens: Mapping[str, int]) -> None:
        """Add requests that sample so many tokens each."""
        for name, count in tokens.items():
            self.add(name, tokens=count)

    def abort(self, name: str) -> None:
        """Abort a request, as when its client goes away."""
        from vllm.v1.request import RequestStatus

        self._aborted.add(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def stream(self, name: str) -> str:
        """The stream of a request."""
        return f"ss-{os.getpid()}-{name}"

    def tokens(self, name: str) -> list[int]:
        """The tokens that a request has sampled."""
        return [token for each in self.outputs[name] for token in each.new_token_ids]

    def said(self, name: str) -> list[Any]:
        """What the orchestrator got of a request, without what is for the next stage alone."""
        from vllm_omni.utils.mm_outputs import partition_flat_payload

        def said(output: Any) -> Any:
            seen = sorted(partition_flat_payload(output.multimodal_output or {})[1])
            return str(output.finish_reason), seen, output.prefill_stats is not None

        return list(map(said, self.outputs[name]))

    # ---- Steps ----

    def step(self) -> list[str]:
        """Schedule, answer, take in; the requests that were in the step."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        self._in_flight.append((scheduled, self.answer(scheduled)))
        while len(self._in_flight) > (self._lag if names else 0):
            for batch_of_client in self.scheduler.update_from_output(*self._in_flight.popleft()).values():
                for output in batch_of_client.outputs:
                    self.outputs[output.request_id].append(output)
        return names

    def answer(self, scheduled: Any) -> Any:
        """What the runner makes of a step."""
        import torch
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
        from vllm_omni.outputs import OmniModelRunnerOutput

        counts, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        if not counts:
            return EMPTY_MODEL_RUNNER_OUTPUT
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._buffers.rotate()
        batch = self._buffers[0] if self._is_overwritten else torch.zeros_like(self._buffers[0])
        batch.fill_(-7)
        sampled = [computed[name] + count - len(PROMPT) for name, count in counts.items()]
        self._made.update(counts.keys())
        payloads: list[Any] = []
        for row, number in enumerate(sampled):
            batch[row] = number
            payloads.append({"codes.audio": batch[row : row + 1], "sr": torch.tensor(24000)})
        return OmniModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: row for row, name in enumerate(counts)},
            sampled_token_ids=[[1 + number] for number in sampled],
            inter_stage_outputs=payloads,
            multimodal_outputs=payloads,
        )

    def run(self) -> None:
        """Step until no request is left, and wait until the next stage has every chunk.

        Raises:
            TimeoutError: That took longer than ``PATIENCE_S``.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self.scheduler.has_requests() or self._is_owed():
            if not (self.scheduler.has_requests() and self.step()):
                time.sleep(0.001)
            if time.monotonic() > deadline:
                put = sum(map(len, self.chunks.values()))
                raise TimeoutError(f"{len(self.scheduler.requests)} requests are left, and {put} chunks were put")

    def _is_owed(self) -> bool:
        """Whether a payload that was made is not in the connector yet; each makes a chunk."""
        live = {name: count for name, count in self._made.items() if name not in self._aborted}
        put = sum(len(self.chunks[self.stream(name)]) for name in live)
        return put < sum(live.values()) or len(self.adapter._pending_save_reqs) > 0
