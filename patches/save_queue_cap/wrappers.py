"""Where the queue and the holds stand in upstream's stage."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime
from omni_fastpath.patches.save_queue_cap import queue as queues
from omni_fastpath.patches.save_queue_cap.credits import LEAST_WITH_ASYNC_SCHEDULING, Credits
from omni_fastpath.patches.save_queue_cap.queue import SaveQueue, stream_of
from omni_fastpath.patches.save_queue_cap.unfetched import Chunks, size_of
from omni_fastpath.values import ConfigError, refusal

if TYPE_CHECKING:
    from omni_fastpath.patches.save_queue_cap import SaveQueueOptions

_runtime = runtime("save_queue_cap")
_counters = _runtime.counters

AUDITED_PROCESSORS = frozenset(
    {
        "vllm_omni.model_executor.stage_input_processors.qwen3_omni.thinker2talker_async_chunk",
        "vllm_omni.model_executor.stage_input_processors.qwen3_omni.talker2code2wav_async_chunk",
    }
)
"""Input processors read for a helper lane: what they keep, they keep per stream. All others get one lane; Qwen3-TTS's,
for one, goes through all streams to count the active ones."""

_ATTRIBUTE = "_omni_fastpath_credits"
_adapters: weakref.WeakSet[Any] = weakref.WeakSet()


def wrapped_init_omni_io_scheduling_state(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Put the queue in place right after the adapter was made.

    Raises:
        ConfigError: The values do not go with this stage's scheduling.
    """
    result = wrapped(*args, **kwargs)
    reason = _not_applicable(instance)
    if reason is not None:
        _runtime.report(State.NOT_APPLICABLE, reason)
        return result
    options: SaveQueueOptions = _runtime.options
    try:
        _refuse(options, instance.vllm_config)
    except ConfigError as error:
        _runtime.report(State.FAILED, str(error))
        raise
    adapter = instance.chunk_transfer_adapter
    is_limited = bool(_limits(options))
    queue = _attach(adapter, instance.vllm_config, owns=is_limited)
    if is_limited:
        setattr(instance, _ATTRIBUTE, Credits(instance, queue, adapter, options, _counters))
    helper = ", with a helper for slow sends" if len(queue.lanes) > 1 else ""
    shared = (
        "" if queue.chunks is not None else "; unfetched chunks are not counted: the connector is not shared memory"
    )
    _runtime.report(
        State.APPLIED,
        f"this stage's save queue is ours{helper}{shared}; the model runner's own "
        "save queue (synchronous full payloads) is not covered",
    )
    return result


def _limits(options: SaveQueueOptions) -> Mapping[str, Any]:
    """The limits that are not null."""
    return options.model_dump(exclude={"max_hold_s"}, exclude_none=True)


def _not_applicable(scheduler: Any) -> str | None:
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
    return None


def _refuse(options: SaveQueueOptions, vllm_config: Any) -> None:
    limits = _limits(options)
    if not limits:
        return
    parallel = vllm_config.parallel_config.pipeline_parallel_size
    if parallel > 1:
        raise refusal(
            "fastpath.save_queue_cap",
            found=f"pipeline_parallel_size {parallel} in this stage and limits ({', '.join(limits)})",
            allowed="limits without pipeline parallelism, or null for each of them",
        )
    credit = options.per_stream_tasks
    if vllm_config.scheduler_config.async_scheduling and credit is not None and credit < LEAST_WITH_ASYNC_SCHEDULING:
        raise refusal(
            "fastpath.save_queue_cap.per_stream_tasks",
            found=f"{credit} in a stage with async scheduling",
            allowed=f"at least {LEAST_WITH_ASYNC_SCHEDULING} with async scheduling, or null",
        )


def _attach(adapter: Any, vllm_config: Any, *, owns: bool = True) -> SaveQueue:
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import (  # noqa: PLC0415 - heavy, once a stage
        SharedMemoryConnector,
    )

    in_shared_memory = type(adapter.connector) is SharedMemoryConnector
    on_cpu = vllm_config.device_config.device_type == "cpu"
    queue = SaveQueue(_counters, keep_all=on_cpu, owns=owns)
    if in_shared_memory:
        queue.chunks = Chunks(queue.gone, _abandoned, look_at=_runtime.options.unfetched_chunks)
    queue.add_lane(adapter.save_thread)
    # Nothing was queued yet: requests come after the scheduler was made.
    adapter._pending_save_reqs = queue
    function = adapter.custom_process_next_stage_input_func
    audited = f"{function.__module__}.{function.__qualname__}" in AUDITED_PROCESSORS
    if in_shared_memory and audited and not queues.FIFO_FOR_BENCHMARKS:
        helper = threading.Condition()
        lane = threading.Thread(target=_Lane(adapter, helper).run, daemon=True, name="omni-fastpath-save-helper")
        lane.start()
        queue.add_lane(lane, helper)
    _adapters.add(adapter)
    return queue


class _Lane:
    """The adapter as the helper lane's ``save_loop`` sees it: all is the adapter's but what the lane sleeps on.

    The loop has no connector to reap, which takes 64 system calls each time that it runs dry: the first lane does it.
    """

    connector = None

    def __init__(self, adapter: Any, condition: threading.Condition) -> None:
        self._adapter = adapter
        self._save_cond = condition

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def run(self) -> None:
        """Upstream's own loop, until the adapter stops."""
        type(self._adapter).save_loop(self)


def _abandoned(count: int) -> None:
    _counters["abandoned_chunks"] += count


def wrapped_schedule(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Renew the holds, then schedule."""
    credits_ = getattr(instance, _ATTRIBUTE, None)
    if credits_ is not None:
        credits_.queue.own_what_waits()  # first: it waits for a lane that is sorting in, and then all is counted
        credits_.hold()
    return wrapped(*args, **kwargs)


def wrapped_send_single_request(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Send, measure, and see what of the stream lies in shared memory."""
    queue = instance._pending_save_reqs
    if not isinstance(queue, SaveQueue):
        return wrapped(*args, **kwargs)
    task = args[0] if args else kwargs["task"]
    stream = stream_of(task)
    number = instance.put_req_chunk.get(stream, 0)
    before = _so_far(instance.connector) if queue.chunks is not None else (0, 0)
    began = time.monotonic()
    try:
        return wrapped(*args, **kwargs)
    finally:
        took = time.monotonic() - began
        has_put = is_unfetched = False
        try:
            is_cleanup = "cleanup_shm" in task
            # The end of a request clears upstream's counter with the send.
            has_put = not is_cleanup and (task["is_finished"] or instance.put_req_chunk.get(stream, 0) != number)
            if queue.chunks is not None:
                if has_put:
                    is_unfetched = _count(queue.chunks, instance, task, stream, number, before)
                if is_cleanup or task["is_finished"]:
                    queue.chunks.ended(stream)
        except Exception:  # the chunk was sent or not as upstream knows; our count must not fail the request
            logger.exception("omni-fastpath: save_queue_cap could not look at the chunks of %s", stream)
        finally:
            queue.sent(task, took, has_put=has_put, is_unfetched=is_unfetched)


def _so_far(connector: Any) -> tuple[int, int]:
    """Chunks and bytes that shared memory took so far."""
    return connector._metrics["puts"], connector._metrics["bytes_transferred"]


def _count(
    chunks: Chunks, adapter: Any, task: Mapping[str, Any], stream: str, number: int, before: tuple[int, int]
) -> bool:
    """Count a chunk that was put, if somebody will fetch it; whether it counts."""
    connector = adapter.connector
    if not _has_receiver(task["request"], connector.stage_id):
        return False
    name = f"{stream}_{connector.stage_id}_{number}"
    puts, nbytes = _so_far(connector)
    # The last chunk of a request may have failed, an abort clears the counter too, and the other lane's puts are in
    # these figures: unless it is clear that they are this chunk's, we look.
    is_ours = adapter.put_req_chunk.get(stream, 0) == number + 1 and puts == before[0] + 1
    size = nbytes - before[1] if is_ours else size_of(name)
    if size:
        chunks.put(stream, name, size)
    return bool(size)


def _has_receiver(request: Any, stage_id: int) -> bool:
    """Whether the next stage takes part in this request: text-only ones end here, and nobody fetches their chunks."""
    info = getattr(request, "additional_information", None)
    if info is None:
        return True
    if not isinstance(info, Mapping):  # a packed payload, of which one entry is wanted
        entry = info.entries.get("omni_final_stage_id")
        final = None if entry is None else entry.scalar_data
    else:
        final = info.get("omni_final_stage_id")
    return final is None or int(final) > stage_id


def in_use() -> str | None:
    """Who would be left with half a queue if the patch were taken off."""
    if any(not adapter.stop_event.is_set() for adapter in _adapters):
        return "a stage's save queue is ours; it cannot be given back while the stage runs"
    return None
