"""Which stages have a queue to bound, and of which a stream may be left out of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from omni_fastpath.config import refusal

from .credits import LEAST_WITH_ASYNC_SCHEDULING, limits_of
from .upstream import may_hold, sends_batches

if TYPE_CHECKING:
    from . import SaveQueueOptions


def not_applicable(scheduler: Any) -> str | None:
    """Why this stage has no save queue to bound; None when it has one."""
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler  # noqa: PLC0415 - it imports what we wrap

    adapter = scheduler.chunk_transfer_adapter
    if not isinstance(scheduler, OmniARScheduler):
        return "this stage's scheduler sends no chunks; only autoregressive stages do"
    if getattr(scheduler, "use_v2_model_runner", False):
        return "model runner v2 sends its chunks itself and has a bound of its own (8 steps)"
    if adapter is None:
        return "no async-chunk: this stage sends no chunks. The model runner's save queue is not covered"
    if adapter.custom_process_next_stage_input_func is None:
        return "no stage takes this one's chunks"
    if sends_batches(adapter):
        return "the chunks of a step's requests are one task here, and are sent together"
    return None


def obstacle_to_holds(scheduler: Any, options: SaveQueueOptions) -> str | None:
    """Why no stream of this stage may be left out of a step; None where it was read that it may.

    A stream that is left out stays among the running ones, and not everything that upstream does bears that.
    """
    return next((why for found, why in _obstacles(scheduler, options) if found), None)


def _obstacles(scheduler: Any, options: SaveQueueOptions) -> Iterator[tuple[bool, str]]:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - as below
    from vllm_omni.core.sched import omni_ar_scheduler as read  # noqa: PLC0415 - it imports what we wrap

    yield not may_hold(scheduler), "vLLM's scheduler cannot leave a running request out of a step on this release"
    kind = type(scheduler)
    yield kind not in (read.OmniARScheduler, read.OmniARAsyncScheduler), f"{kind.__name__} was not read for it"
    paired = getattr(Scheduler.schedule, "_cfg_pairing_patched", False)
    yield paired, "requests are scheduled in pairs here (classifier-free guidance)"
    config = scheduler.vllm_config
    # Another adapter's requests are admitted while the holder of the last one is left out, and then all of them run.
    lora = getattr(config, "lora_config", None) is not None
    yield lora, "LoRA is on, and vLLM counts only the adapters of requests that are in the step"
    drafts = getattr(config, "speculative_config", None) is not None
    yield drafts, "speculative decoding keeps drafts of the last step's requests"
    transfer = getattr(config, "kv_transfer_config", None) is not None or _sends_cache(config)
    yield transfer, "KV cache is transferred to other engines, and requests end when that is done"
    # With every limit asked for it is refused instead.
    parallel = config.parallel_config.pipeline_parallel_size > 1 and options.holds != "always"
    yield parallel, "pipeline parallelism uses the same field"


def _sends_cache(config: Any) -> bool:
    kv_config = getattr(getattr(config, "model_config", None), "omni_kv_config", None)
    if isinstance(kv_config, Mapping):
        return bool(kv_config.get("need_send_cache") or kv_config.get("kv_transfer_criteria"))
    return kv_config is not None


def refuse(options: SaveQueueOptions, vllm_config: Any) -> None:
    """Refuse limits that do not go with a stage's scheduling.

    Raises:
        ConfigError: They do not.
    """
    limits = limits_of(options)
    if not limits:
        return
    parallel = vllm_config.parallel_config.pipeline_parallel_size
    if parallel > 1:
        raise refusal(
            "fastpath.save_queue_cap",
            found=f"holds: always, pipeline_parallel_size {parallel} in this stage and limits ({', '.join(limits)})",
            allowed="another value of holds, limits without pipeline parallelism, or null for each of them",
        )
    credit = limits.get("per_stream_tasks")
    if vllm_config.scheduler_config.async_scheduling and credit is not None and credit < LEAST_WITH_ASYNC_SCHEDULING:
        raise refusal(
            "fastpath.save_queue_cap.per_stream_tasks",
            found=f"{credit:.0f} in a stage with async scheduling",
            allowed=f"at least {LEAST_WITH_ASYNC_SCHEDULING} with async scheduling, or null",
        )
