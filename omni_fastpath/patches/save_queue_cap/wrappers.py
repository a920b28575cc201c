"""The wrappers of ``save_queue_cap``: the queue and the holds in upstream's stage, and which stages get them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from omni_fastpath.declare import State
from omni_fastpath.guard import Call
from omni_fastpath.ledger import state_of

from .holds import Holds, Load
from .save_queue import SaveQueue
from .unfetched import Unfetched

if TYPE_CHECKING:
    from . import SaveQueueOptions

_patch = state_of("save_queue_cap")
_counters = _patch.counters

_ATTRIBUTE = "_omni_fastpath_save_queue"
_queues: WeakSet[SaveQueue] = WeakSet()


# ---- Setting up, once a stage ----


def wrapped_scheduler_made(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
    """Install the queue right after the adapter was made."""
    result = wrapped(*args, **kwargs)
    _set_up(instance)
    return result


def _set_up(scheduler: Any) -> None:
    # Heavy, once a stage.
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector  # noqa: PLC0415

    reason = not_applicable(scheduler)
    if reason is not None:
        _patch.report(State.NOT_APPLICABLE, reason)
        return
    options: SaveQueueOptions = _patch.options
    adapter = scheduler.chunk_transfer_adapter
    unheld = obstacle_to_holds(scheduler)
    if unheld is None and options.max_bytes is None and options.max_tasks is None:
        unheld = "max_bytes and max_tasks are null"
    is_counted = type(adapter.connector) is SharedMemoryConnector
    queue = SaveQueue(
        adapter,
        holds=Holds(options.max_bytes, options.max_tasks, options.max_hold_s) if unheld is None else None,
        unfetched=Unfetched() if is_counted else None,
        copies_all=scheduler.vllm_config.device_config.device_type == "cpu",
    )
    _queues.add(queue)
    words = ["this stage's save queue is fair by stream"]
    words += [f"no stream is held: {unheld}"] if unheld is not None else []
    words += [] if is_counted else ["unfetched chunks are not counted: the connector is not shared memory"]
    words += ["the model runner's own save queue (synchronous full payloads) is not covered"]
    _patch.report(State.APPLIED, "; ".join(words))
    setattr(scheduler, _ATTRIBUTE, queue)
    # Last, so that the queue stays upstream's if anything fails. Nothing is queued yet, because the scheduler is new.
    adapter._pending_save_reqs = queue


def step_aside() -> None:
    """Make every queue send in order of arrival, as upstream's does. No stream is held."""
    for queue in list(_queues):
        queue.step_aside()


# ---- Each step ----


def wrapped_schedule(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
    """Let the queue weigh the payloads of its tasks, renew the holds, then schedule."""
    queue: SaveQueue | None = getattr(instance, _ATTRIBUTE, None)
    if queue is not None:
        queue.before_step()
        if queue.holds is not None:
            _hold(instance, queue, queue.holds)
    return wrapped(*args, **kwargs)


def _hold(scheduler: Any, queue: SaveQueue, holds: Holds) -> None:
    """While a limit is exceeded, leave the streams with the most out of the step that is about to be scheduled."""
    nbytes, tasks = queue.nbytes, queue.tasks
    if not holds.is_over(nbytes, tasks):
        holds.end_all()
        return
    running = [
        Load(each, each.request_id, each.num_computed_tokens, *queue.of(each.external_req_id))
        for each in scheduler.running
    ]
    held = holds.choose(running, nbytes, tasks, time.monotonic())
    # schedule() counts its step first, and then skips the requests that are eligible only after it.
    step = scheduler.current_step + 2
    for request in held:
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, step)
    _counters["holds"], _counters["expired_holds"] = holds.began, holds.expired


# ---- Which stages ----


def not_applicable(scheduler: Any) -> str | None:
    """Why this stage has no save queue to bound, or None if it has one."""
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler  # noqa: PLC0415 - it imports what we wrap

    adapter = scheduler.chunk_transfer_adapter
    if not isinstance(scheduler, OmniARScheduler):
        return "this stage's scheduler sends no chunks, only autoregressive stages do"
    if getattr(scheduler, "use_v2_model_runner", False):
        return "model runner v2 sends its chunks itself and has its own bound (8 steps)"
    if adapter is None:
        return "no async-chunk: this stage sends no chunks. The model runner's save queue is not covered"
    if adapter.custom_process_next_stage_input_func is None:
        return "no stage receives chunks from this one"
    if getattr(adapter, "custom_process_next_stage_input_batch_func", None) is not None:  # from 0.32 on
        return "the chunks of all requests of a step are one task here, and are sent together"
    return None


def obstacle_to_holds(scheduler: Any) -> str | None:
    """Why no stream of this stage may be left out of a step, or None where it was found to be safe.

    A stream that is left out stays among the running ones, which not every feature of upstream allows.
    """
    return next((why for found, why in _obstacles(scheduler) if found), None)


def _obstacles(scheduler: Any) -> Iterator[tuple[bool, str]]:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - as below
    from vllm_omni.core.sched import omni_ar_scheduler as read  # noqa: PLC0415 - it imports what we wrap

    kind, config = type(scheduler), scheduler.vllm_config
    transfer = getattr(config, "kv_transfer_config", None) is not None or _sends_cache(config)
    # While the request with the last adapter is left out, requests with another one are admitted. Then all of them run.
    lora = getattr(config, "lora_config", None) is not None
    yield kind not in (read.OmniARScheduler, read.OmniARAsyncScheduler), f"{kind.__name__} was not checked for it"
    paired = getattr(Scheduler.schedule, "_cfg_pairing_patched", False)
    yield paired, "requests are scheduled in pairs here (classifier-free guidance)"
    yield lora, "LoRA is on, and vLLM counts only the adapters of requests that are in the step"
    drafts = getattr(config, "speculative_config", None) is not None
    yield drafts, "speculative decoding keeps drafts of the last step's requests"
    yield transfer, "KV cache is transferred to other engines, and requests end when that is done"
    yield config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism uses the same field"


def _sends_cache(config: Any) -> bool:
    kv_config = getattr(getattr(config, "model_config", None), "omni_kv_config", None)
    if isinstance(kv_config, Mapping):  # which says which stage it is, in every stage
        return bool(kv_config.get("need_send_cache") or kv_config.get("kv_transfer_criteria"))
    return kv_config is not None
