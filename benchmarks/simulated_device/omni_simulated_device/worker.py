"""The simulated workers: upstream's worker interface over a clock.

Payloads lie in memory as upstream's runners leave them on a GPU stage: ``vllm_omni/worker/gpu_ar_model_runner.py``
(``_build_omni_model_runner_output_from_snapshot``), with ``vllm_omni/utils/mm_outputs.py``, whose functions do it here
too. The step's batch comes to main memory as one tensor
for each output, new at each step, and a request's payload is its rows of it. ``element[start:end].contiguous()`` copies
nothing, because rows are contiguous already: whoever holds one request's payload holds the whole step's. What is the
same for everybody (the marks of speech) is cloned for each request. Generation stages move each request's output by
itself.

One thing cannot be had here: with async scheduling upstream's Qwen3 stages copy the batch into *pinned* memory
(``_copy_tensor_payload_to_cpu``), which only a CUDA build of torch can allocate. Ordinary memory stands in for it. Both
are new at each step (``empty_like``), so that nothing but ``is_pinned()`` and its price differ.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase
from vllm_omni.distributed.omni_connectors.utils.config import stage_sends_async_output
from vllm_omni.engine.serialization import deserialize_additional_information
from vllm_omni.outputs import OmniModelRunnerOutput
from vllm_omni.utils.mm_outputs import partition_payload_list, to_payload_element
from vllm_omni.worker.mixins import OmniWorkerMixin
from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

from omni_simulated_device import config, stages

logger = init_logger("vllm.omni_simulated_device")

_Payload = dict[str, torch.Tensor]
_Payloads = list[_Payload | None] | None


class _DeviceOutput(AsyncModelRunnerOutput):  # type: ignore[misc]
    """A step's result that exists from the start but is handed over only when the device would have finished."""

    def __init__(self, output: OmniModelRunnerOutput, ready_at: float) -> None:
        self.output, self._ready_at = output, ready_at

    def get_output(self) -> OmniModelRunnerOutput:
        """Sleep until the device is done (monotonic seconds), then return the result."""
        remaining = self._ready_at - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)
        return self.output


def _goes_on(info: Any) -> bool:
    """Whether a stage after the first one works on the request, for all that the orchestrator has noted on it.

    Upstream's runner makes no payload for a request that ends at stage 0, such as one for text alone.
    """
    final_stage = deserialize_additional_information(info).get("omni_final_stage_id")
    return final_stage is None or int(final_stage) > 0


def _scores(tokens: Sequence[int], first: int, count: int) -> LogprobsTensors:
    """Log probabilities of *tokens*, the first one at position *first*, as upstream's sampler gathers them.

    Each row has the token's own, then the *count* likeliest, of which it is the first. They follow from token and
    position: a row that is lost or swapped on the way shows.
    """
    own = torch.tensor(tokens, dtype=torch.int32).reshape(-1, 1)
    others = torch.tensor([0, *range(count)], dtype=torch.int32)
    position = torch.arange(first, first + len(tokens)).reshape(-1, 1)
    values = -(1 + (7 * position + own) % 64) / 32 - others
    return LogprobsTensors(own + others, values.float(), torch.ones(len(tokens), dtype=torch.int64))


# vllm-omni refuses a connector deployment whose runner does not derive from its connector mixin.
class SimulatedModelRunner(OmniConnectorModelRunnerMixin):  # type: ignore[misc]
    """The request bookkeeping of a real model runner, with `stages` in place of a model."""

    samples_tokens = True

    def __init__(self, vllm_config: Any, settings: config.DeviceSettings | None = None) -> None:
        settings = settings or config.load()
        stage = vllm_config.model_config.model_stage
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.kv_caches: list[torch.Tensor] = []
        self.model = stages.build(vllm_config, settings)
        self.settings = settings.stage(stage)
        self._async = bool(vllm_config.scheduler_config.async_scheduling)
        self._requests: dict[str, stages.RequestState] = {}
        self._scheduled: Any = None
        self._device_free_at = 0.0
        logger.info(
            "[simulated device] stage=%s async_scheduling=%s seed=%d %s",
            stage,
            self._async,
            settings.seed,
            self.settings,
        )

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Take over the scheduler's changes; None means that `sample_tokens` follows.

        A step without tokens returns vLLM's own empty output, which has none of vLLM-Omni's fields, as upstream's do.
        """
        for req_id in scheduler_output.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._requests[new.req_id] = stages.RequestState(
                req_id=new.req_id,
                prompt_token_ids=list(new.prompt_token_ids or ()),
                sampling_params=new.sampling_params,
                info=getattr(new, "additional_information", None) or {},
                computed=new.num_computed_tokens,
                goes_on=_goes_on(getattr(new, "additional_information", None)),
            )
        cached = scheduler_output.scheduled_cached_reqs
        infos: Mapping[str, Any] = getattr(cached, "additional_information", None) or {}
        prompts: Mapping[str, Any] = getattr(cached, "prompt_token_ids", None) or {}
        for position, req_id in enumerate(cached.req_ids):
            request = self._requests[req_id]
            request.computed = cached.num_computed_tokens[position]
            request.info = infos.get(req_id) or {}
            if req_id in prompts and not self.samples_tokens:  # a code2wav chunk replaces the prompt
                request.prompt_token_ids = list(prompts[req_id] or ())
        if scheduler_output.total_num_scheduled_tokens <= 0:
            nothing: ModelRunnerOutput = self.attach_omni_connector_output(EMPTY_MODEL_RUNNER_OUTPUT)
            return nothing
        self._scheduled = scheduler_output
        return None

    def sample_tokens(self, _grammar_output: Any = None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Answer for every scheduled request and put the step on the device's timeline."""
        scheduler_output, self._scheduled = self._scheduled, None
        if scheduler_output is None:
            nothing: ModelRunnerOutput = self.attach_omni_connector_output(
                OmniModelRunnerOutput.with_kv_conn_output_only(None)
            )
            return nothing
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        requests = [self._requests[req_id] for req_id in scheduled]
        results = [self.model.step(each, count) for each, count in zip(requests, scheduled.values(), strict=True)]
        inter_stage, client = self._split(self._payloads(requests, results))
        output = OmniModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={req_id: index for index, req_id in enumerate(scheduled)},
            sampled_token_ids=[r.tokens for r in results] if self.samples_tokens else [],
            inter_stage_outputs=inter_stage,
            multimodal_outputs=client,
            logprobs=self._logprobs(requests, results),
            prompt_logprobs_dict=self._prompt_logprobs(requests, results),
            omni_connector_output=self.get_omni_connector_output(),
        )
        step_s = self.settings.step_s(scheduler_output.total_num_scheduled_tokens, len(results))
        self._device_free_at = max(time.monotonic(), self._device_free_at) + step_s
        pending = _DeviceOutput(output, self._device_free_at)
        return pending if self._async else pending.get_output()

    def _logprobs(
        self, requests: Sequence[stages.RequestState], results: Sequence[stages.StepResult]
    ) -> LogprobsLists | None:
        """A row for each request, as wide as the one that asked for most wants it."""
        asked = [each.sampling_params.logprobs for each in requests] if self.samples_tokens else []
        count = max((number for number in asked if number is not None), default=None)
        if count is None:
            return None
        rows = [
            _scores(result.tokens or [0], request.computed, count)
            for request, result in zip(requests, results, strict=True)
        ]
        columns = zip(*(each[:3] for each in rows), strict=True)
        return LogprobsTensors(*map(torch.cat, columns)).tolists()

    def _prompt_logprobs(
        self, requests: Sequence[stages.RequestState], results: Sequence[stages.StepResult]
    ) -> dict[str, LogprobsTensors]:
        """Of whoever asked, with the first token: of every token of the prompt but the first."""
        found = {}
        for request, result in zip(requests, results, strict=True):
            count = request.sampling_params.prompt_logprobs if self.samples_tokens else None
            if count is not None and result.tokens and request.computed < len(request.prompt_token_ids):
                found[request.req_id] = _scores(request.prompt_token_ids[1:], 1, count)
        return found

    def _payloads(
        self, requests: Sequence[stages.RequestState], results: Sequence[stages.StepResult]
    ) -> list[_Payload]:
        """Each request's part of what the model puts out, cut as upstream's AR runner cuts it: views of the batch."""
        if not any(request.goes_on for request in requests):
            return [{} for _ in requests]
        outputs = self.model.outputs(results)
        hidden = outputs.pop("hidden", None)
        ends = list(itertools.accumulate(len(result.rows) for result in results))
        payloads: list[_Payload] = []
        for index, (request, start, end) in enumerate(zip(requests, [0, *ends], ends, strict=False)):
            if not request.goes_on:
                payloads.append({})
                continue
            payload: _Payload = {
                name: to_payload_element(element, index, start, end, seq_len=ends[-1])
                for name, element in outputs.items()
            }
            payloads.append(payload if hidden is None else {"hidden": hidden[start:end], **payload})
        return payloads

    def _split(self, payloads: list[_Payload]) -> tuple[_Payloads, _Payloads]:
        """What goes to the next stage and what to the client, as upstream's AR runner has it.

        A stage whose connector is no sender gives both the very same list: what the next stage gets is also sent to the
        orchestrator.
        """
        if self.model_config.async_chunk and stage_sends_async_output(self.model_config):
            found: tuple[_Payloads, _Payloads] = partition_payload_list(payloads)
            return found
        both = [payload or None for payload in payloads]
        return (both, both) if any(both) else (None, None)


class SimulatedGenerationModelRunner(SimulatedModelRunner):
    """Runner of a stage that samples nothing."""

    samples_tokens = False

    def _payloads(
        self, requests: Sequence[stages.RequestState], results: Sequence[stages.StepResult]
    ) -> list[_Payload]:
        """Each request's output, moved by itself, as upstream's generation runner does."""
        outputs = self.model.outputs(results)
        return [
            {name: values[index] for name, values in outputs.items()} if request.goes_on else {}
            for index, request in enumerate(requests)
        ]

    def _split(self, payloads: list[_Payload]) -> tuple[_Payloads, _Payloads]:
        """As upstream's generation runner: under async-chunk every stage's payload is split."""
        if not self.model_config.async_chunk:
            return list(payloads), list(payloads)
        found: tuple[_Payloads, _Payloads] = partition_payload_list(payloads)
        return found


class SimulatedARWorker(OmniWorkerMixin, WorkerBase):  # type: ignore[misc]
    """A worker without weights, kernels or KV memory."""

    model_runner_cls: type[SimulatedModelRunner] = SimulatedModelRunner

    def init_device(self) -> None:
        """Create the runner; there is no device to open."""
        self.device = torch.device("cpu")
        self.model_runner = self.model_runner_cls(self.vllm_config)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There are no weights."""

    def get_model(self) -> Any:
        """The stage's behaviour stands where the module would."""
        return self.model_runner.model

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """One pretended layer: the scheduler accounts for blocks, nothing is allocated."""
        return {
            "simulated.layers.0.attn": FullAttentionSpec(
                block_size=self.cache_config.block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
            )
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The layouts of the CPU attention backend, which the platform names."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        return [layout.name for layout in get_supported_kv_cache_layouts([CPUAttentionBackend])]

    def determine_available_memory(self) -> int:
        """Pretended KV cache memory, bytes."""
        return config.KV_CACHE_MIB * 2**20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Keep the block plan; there is no cache to allocate."""
        self.kv_cache_config = kv_cache_config

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled; the times are seconds."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Follow the engine when it shortens the context to what fits the cache."""
        self.model_config.max_model_len = max_model_len

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Every stage is driven through generate requests."""
        return ("generate",)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """First half of a step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any = None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Second half of a step."""
        return self.model_runner.sample_tokens(grammar_output)

    def encoder_loaded(self) -> bool:
        """Asked before multimodal input; there is no encoder to wait for."""
        return True


class SimulatedGenerationWorker(SimulatedARWorker):
    """Worker of code2wav stages."""

    model_runner_cls = SimulatedGenerationModelRunner
