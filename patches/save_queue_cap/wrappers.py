"""Where the queue and the holds stand in upstream's stage."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_fastpath.declare import State
from omni_fastpath.ledger import logger, runtime
from omni_fastpath.patches.save_queue_cap import queue as queues
from omni_fastpath.patches.save_queue_cap.credits import LEAST_WITH_ASYNC_SCHEDULING, WIDE, Credits, limits_of
from omni_fastpath.patches.save_queue_cap.fair import FairQueue, stream_of
from omni_fastpath.patches.save_queue_cap.payload import KeptPayload, give
from omni_fastpath.patches.save_queue_cap.queue import STEPS_UNLIMITED, Calm, SaveQueue
from omni_fastpath.patches.save_queue_cap.unfetched import Book, Chunks, size_of
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

_ATTRIBUTE = "_omni_fastpath_save_queue"
_adapters: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(slots=True)
class _Stage:
    """What stands on a scheduler: its adapter's queue, and the holds where streams may be held."""

    queue: SaveQueue
    credits: Credits | None


def wrapped_init_omni_io_scheduling_state(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Put the queue in place right after the adapter was made.

    Raises:
        ConfigError: The values do not go with this stage's scheduling.
    """
    result = wrapped(*args, **kwargs)
    adapter = instance.chunk_transfer_adapter
    before = getattr(adapter, "_pending_save_reqs", None)
    try:
        _set_up(instance)
    except ConfigError as error:
        _runtime.report(State.FAILED, str(error))
        raise
    except Exception as error:  # the stage starts as upstream's
        if adapter is not None:
            adapter._pending_save_reqs = before
        logger.exception("omni-fastpath: save_queue_cap could not be set up")
        _runtime.report(State.FAILED, f"setting up failed: {error!r}; this stage's save queue is upstream's")
    return result


def _set_up(scheduler: Any) -> None:
    reason = _not_applicable(scheduler)
    if reason is not None:
        _runtime.report(State.NOT_APPLICABLE, reason)
        return
    options: SaveQueueOptions = _runtime.options
    adapter = scheduler.chunk_transfer_adapter
    unheld = obstacle_to_holds(scheduler)
    if unheld is None:
        _refuse(options, scheduler.vllm_config)
    queue = _attach(adapter, scheduler.vllm_config, options)
    credits_ = None
    if unheld is None and limits_of(options):
        credits_ = Credits(scheduler, queue.fair, adapter, options, _counters)
    setattr(scheduler, _ATTRIBUTE, _Stage(queue, credits_))
    helper = ", with a helper for slow sends" if len(queue.lanes) > 1 else ""
    shared = (
        "" if queue.chunks is not None else "; unfetched chunks are not counted: the connector is not shared memory"
    )
    if unheld is not None:
        held = f"; no stream is held: {unheld}"
    elif credits_ is None:
        held = "; no stream is held: no limit does"
    else:
        held = f"; streams are held for {', '.join(limits_of(options))}"
    _runtime.report(
        State.APPLIED,
        f"this stage's save queue is ours{helper}{held}{shared}; the model runner's own "
        "save queue (synchronous full payloads) is not covered",
    )


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


def obstacle_to_holds(scheduler: Any) -> str | None:
    """Why no stream of this stage may be left out of a step; None where it was read that it may.

    A stream that is left out stays among the running ones, and not everything that upstream does bears that.
    """
    return next((why for found, why in _obstacles(scheduler) if found), None)


def _obstacles(scheduler: Any) -> Iterator[tuple[bool, str]]:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - as below
    from vllm_omni.core.sched import omni_ar_scheduler as read  # noqa: PLC0415 - it imports what we wrap

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
    parallel = config.parallel_config.pipeline_parallel_size > 1 and _runtime.options.holds != "always"
    yield parallel, "pipeline parallelism uses the same field"


def _sends_cache(config: Any) -> bool:
    kv_config = getattr(getattr(config, "model_config", None), "omni_kv_config", None)
    if isinstance(kv_config, Mapping):
        return bool(kv_config.get("need_send_cache") or kv_config.get("kv_transfer_criteria"))
    return kv_config is not None


def _refuse(options: SaveQueueOptions, vllm_config: Any) -> None:
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


CALM_BYTES = 0.75
"""Share of ``total_bytes`` that ends the calm. Until then one deque serves everybody alike, and sorting and weighing
cost a lane 40 us a task more: 128 streams whose sends take more time than there is had half of the default queued."""

CLEANUPS = 2
"""Tasks that a stream may add besides one in each step: a forced terminal and a clean-up."""


def calm_of(options: SaveQueueOptions) -> Calm:
    """Until when a queue is calm, by the limits."""
    none = float("inf")
    steps = STEPS_UNLIMITED
    if options.per_stream_tasks is not None:  # whatever may be held: it decides who is managed
        steps = WIDE * options.per_stream_tasks - LEAST_WITH_ASYNC_SCHEDULING - CLEANUPS
    if options.unfetched_chunks is not None:
        steps = 0  # that is counted by stream
    return Calm(
        steps=max(0, steps),
        tasks=none if options.total_tasks is None else WIDE * options.total_tasks / 2,
        nbytes=none if options.total_bytes is None else CALM_BYTES * options.total_bytes,
        most_nbytes=none if options.total_bytes is None else options.total_bytes,
    )


def _attach(adapter: Any, vllm_config: Any, options: SaveQueueOptions, calm: Calm | None = None) -> SaveQueue:
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import (  # noqa: PLC0415 - heavy, once a stage
        SharedMemoryConnector,
    )

    in_shared_memory = type(adapter.connector) is SharedMemoryConnector
    on_cpu = vllm_config.device_config.device_type == "cpu"
    fair = FairQueue(_counters, keep_all=on_cpu, fifo=queues.FIFO_FOR_BENCHMARKS)
    if in_shared_memory:
        fair.chunks = Chunks(fair.gone, _abandoned, look_at=options.unfetched_chunks)
    queue = SaveQueue(
        fair,
        _counters,
        calm=calm or calm_of(options),
        book=Book(adapter.connector) if in_shared_memory else None,
        keep_all=on_cpu,
        is_live=lambda stream: stream in adapter._sender_tokens,
        is_deaf=lambda request: not has_receiver(request, adapter.connector.stage_id),
        stepped_aside=_stepped_aside,
    )
    queue.add_lane(adapter.save_thread)
    # Nothing was queued yet: requests come after the scheduler was made.
    adapter._pending_save_reqs = queue
    function = adapter.custom_process_next_stage_input_func
    audited = f"{function.__module__}.{function.__qualname__}" in AUDITED_PROCESSORS
    if in_shared_memory and audited and not queues.FIFO_FOR_BENCHMARKS:
        helper = threading.Condition()
        lane = threading.Thread(target=_Lane(adapter, helper, queue).run, daemon=True, name="omni-fastpath-save-helper")
        lane.start()
        queue.add_lane(lane, helper)
    _adapters.add(adapter)
    return queue


def _stepped_aside(reason: str) -> None:
    _counters["stepped_aside"] = 1
    _runtime.report(State.FAILED, f"stepped aside: {reason}")


class _Lane:
    """The adapter as the helper lane's ``save_loop`` sees it: all is the adapter's but what the lane sleeps on.

    The loop has no connector to reap, which takes 64 system calls each time that it runs dry: the first lane does it.
    """

    connector = None

    def __init__(self, adapter: Any, condition: threading.Condition, queue: SaveQueue) -> None:
        self._adapter = adapter
        self._save_cond = condition
        self._pending_save_reqs = queue  # its own: never upstream's deque, should setting up fail after it runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def run(self) -> None:
        """Upstream's own loop, until the adapter stops."""
        type(self._adapter).save_loop(self)


def _abandoned(count: int) -> None:
    _counters["abandoned_chunks"] += count


def wrapped_schedule(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """See how the queue is, renew the holds, then schedule."""
    stage: _Stage | None = getattr(instance, _ATTRIBUTE, None)
    if stage is not None:
        try:
            _before_step(stage)
        except Exception as error:  # the step is taken all the same
            stage.queue.step_aside(error)
    return wrapped(*args, **kwargs)


def _before_step(stage: _Stage) -> None:
    queue = stage.queue
    if not queue.before_step():
        return
    credits_ = stage.credits
    if credits_ is not None:
        credits_.hold()
    queue.calm_down(is_holding=credits_ is not None and credits_.is_holding)


def wrapped_send_single_request(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Send, measure, and see what of the stream lies in shared memory."""
    queue = instance._pending_save_reqs
    if type(queue) is not SaveQueue:
        return wrapped(*args, **kwargs)
    task = args[0] if args else kwargs["task"]
    if not queue.is_calm and not queue.is_aside:
        return _send_managed(wrapped, instance, args, kwargs, queue, task)
    # Nothing afterwards: that the lane asks for more says that it is done. It runs once a task.
    if type(task.get("multimodal_output")) is KeptPayload:
        _give(queue, task)
    return wrapped(*args, **kwargs)


def _give(queue: SaveQueue, task: dict[str, Any]) -> None:
    """Make tensors again of what was copied. What cannot be made fails its request, as a send that fails."""
    try:
        task["multimodal_output"] = give(task["multimodal_output"])
    except Exception as error:
        queue.step_aside(error)
        task["multimodal_output"] = give(task["multimodal_output"])


def _send_managed(
    wrapped: Callable[..., Any], adapter: Any, args: Any, kwargs: Any, queue: SaveQueue, task: dict[str, Any]
) -> Any:
    chunks: Chunks | None = None
    stream, number, before = "", 0, (0, 0)
    try:
        chunks = queue.chunks
        stream = stream_of(task)
        number = adapter.put_req_chunk.get(stream, 0)
        before = _so_far(adapter.connector) if chunks is not None else (0, 0)
    except Exception as error:
        queue.step_aside(error)
    began = time.monotonic()
    try:
        # Here and not when it is taken: what cannot be made a tensor again fails its request, as a send that fails.
        if type(task.get("multimodal_output")) is KeptPayload:
            _give(queue, task)
        return wrapped(*args, **kwargs)
    finally:
        took = time.monotonic() - began
        has_put = is_unfetched = False
        try:
            is_cleanup = "cleanup_shm" in task
            # The end of a request clears upstream's counter with the send.
            has_put = not is_cleanup and (task["is_finished"] or adapter.put_req_chunk.get(stream, 0) != number)
            if chunks is not None:
                if has_put and not has_receiver(task["request"], adapter.connector.stage_id):
                    queue.note_deaf(stream)
                elif has_put:
                    is_unfetched = _count(chunks, adapter, stream, number, before)
                if is_cleanup or task["is_finished"]:
                    chunks.ended(stream)
        except Exception:  # the chunk was sent or not as upstream knows; our count must not fail the request
            logger.exception("omni-fastpath: save_queue_cap could not look at the chunks of %s", stream)
        try:
            queue.sent(task, took, has_put=has_put, is_unfetched=is_unfetched)
        except Exception as error:
            queue.step_aside(error)


def _so_far(connector: Any) -> tuple[int, int]:
    """Chunks and bytes that shared memory took so far."""
    return connector._metrics["puts"], connector._metrics["bytes_transferred"]


def _count(chunks: Chunks, adapter: Any, stream: str, number: int, before: tuple[int, int]) -> bool:
    """Count a chunk that was put; whether it is there."""
    connector = adapter.connector
    name = f"{stream}_{connector.stage_id}_{number}"
    puts, nbytes = _so_far(connector)
    # The last chunk of a request may have failed, an abort clears the counter too, and the other lane's puts are in
    # these figures: unless it is clear that they are this chunk's, we look.
    is_ours = adapter.put_req_chunk.get(stream, 0) == number + 1 and puts == before[0] + 1
    size = nbytes - before[1] if is_ours else size_of(name)
    return bool(size) and chunks.put(stream, name, size)


def has_receiver(request: Any, stage_id: int) -> bool:
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
