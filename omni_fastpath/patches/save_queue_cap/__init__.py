"""Chunks for the next stage are sent fairly by stream and bounded in bytes. The producer never blocks.

What:
    Tasks of a stage's save thread are sent in order of arrival, except those of streams whose sends are slow: these are
    sent when the others had as much of the thread's time, or have no task. While more than ``max_bytes`` are queued,
    being sent or, in shared memory, not fetched, the streams with the most are left out of steps (held). After
    ``max_hold_s`` a held stream takes one step. So there is at most twice ``max_bytes``, plus what the running steps
    add. Nothing is dropped, the order within a stream stays, and ends and clean-up are never held.
Why:
    Upstream's queue is first in, first out, and neither it nor the chunks in shared memory have a bound. One slow
    receiver delays the chunks of all streams, and memory grows as long as it is slow.
Why not a hook:
    The queue is a private member, and upstream's scheduler has no hook that decides whether a stream may run.
Scope:
    Autoregressive stages with async-chunk, model runner v1 and a next stage. Upstream skips a held request for a step
    (``next_decode_eligible_step``) and keeps all else of it. No stream is held where that was not found safe: other
    scheduler classes, paired requests, LoRA, speculative decoding, transfer of KV cache, pipeline parallelism. There is
    one save thread, so a put that hangs stops all audio of its stage. Not covered: the model runner's own save queue
    (synchronous full payloads, model runner v2), and from 0.32 on tasks of a whole step (Fish Audio).
Fragility:
    Replaces ``_pending_save_reqs`` of the adapter by an object with the four operations that upstream uses, right after
    the adapter is made, and sets ``next_decode_eligible_step`` of requests. Unfetched chunks are found by their names.
    A task has ``request``, ``multimodal_output``, ``cleanup_shm`` or ``release_shm``; one of another shape makes the
    patch step aside. No class declares ``omni_final_stage_id`` of a request's additional information, nor from 0.32 on
    ``custom_process_next_stage_input_batch_func`` of the adapter.
Upstream thread:
    vllm-omni PR #3690 (a global semaphore, closed), vllm-omni issue #3535 (credits per stream, proposed).
Remove when:
    Upstream bounds its save queue per stream, in every supported release.
"""

from __future__ import annotations

from pydantic import ByteSize, Field

from omni_fastpath.declare import STAGE_NAMES, AnySeam, Counter, Fit, Options, Patch, Process, Relies, Wrap


class SaveQueueOptions(Options):
    """The limits. With null there is no limit, as upstream."""

    max_bytes: ByteSize | None = Field(
        default=ByteSize(256 * 2**20),
        ge=2**16,
        description="payload of all streams of a stage together: queued, being sent and, if it is in shared memory, "
        "not fetched. Above this limit the streams with the most are left out of steps",
    )
    max_tasks: int | None = Field(default=None, ge=1, description="most queued chunks of all streams, likewise")
    max_hold_s: float = Field(
        default=5.0, ge=0.01, le=3600.0, description="seconds after which a held stream takes one step in any case"
    )


BASE = "vllm_omni.distributed.omni_connectors.transfer_adapter.base"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
SHARED_MEMORY = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"
MIXIN = "vllm_omni.core.sched.omni_scheduler_mixin"

SEAMS: tuple[AnySeam, ...] = (
    Wrap(MIXIN, "OmniSchedulerMixin._init_omni_io_scheduling_state", wrapper="wrapped_scheduler_made"),
    Wrap("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler.schedule", wrapper="wrapped_schedule"),
    Relies("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    *(Relies(BASE, f"OmniTransferAdapterBase.{name}") for name in ("__init__", "save_loop")),
    Relies(ADAPTER, "OmniChunkTransferAdapter._send_single_request_for_generation"),
    Relies(SHARED_MEMORY, "SharedMemoryConnector.put"),
    *(Relies("vllm_omni.utils.mm_outputs", name) for name in ("to_payload_element", "_to_cpu")),
    Relies("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler"),
    Relies("vllm_omni.request", "OmniRequest"),
    STAGE_NAMES,
    Relies(ADAPTER, "OmniChunkTransferAdapter"),
    Relies(SHARED_MEMORY, "SharedMemoryConnector"),
)

PATCH = Patch(
    name="save_queue_cap",
    summary="chunks for the next stage are sent fairly by stream, and bounded in bytes",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    options=SaveQueueOptions,
    default_on=False,
    counters=(
        Counter("tasks", "save tasks that were queued"),
        Counter("slow_sends", "sends that took 20 ms or more"),
        Counter("holds", "holds that began, each of a stream that was left out of steps until its payload had drained"),
        Counter("expired_holds", "holds that ended after max_hold_s, for one step"),
        Counter("max_queued_tasks", "most save tasks queued and being sent", is_maximum=True),
        Counter("max_outstanding_bytes", "most bytes queued, being sent and not fetched", is_maximum=True),
    ),
    rows=(Fit(releases=("0.28.0", "0.30.0", "0.32.0rc1"), seams=SEAMS),),
)
