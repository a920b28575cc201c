"""Chunks for the next stage are sent fairly by stream and bounded in bytes. The producer never blocks.

What:
    With async-chunk a stage hands the payloads of every step, as tasks, to a save thread, which sends them to the next
    stage. With the patch each stream has its own queue. Tasks are sent in order of arrival, except those of streams
    whose sends are slow. Such a stream is sent when the others have had as much of the thread's time, or when nothing
    else is queued. While the payload of all streams is over ``max_bytes`` (queued, being sent and, over shared memory,
    put and not yet fetched), the streams with the most are held, which means that they are left out of the next steps
    until their payload has drained. A hold ends after ``max_hold_s`` at the latest. Then the stream takes one step and
    may be held again. So there is at most twice ``max_bytes``, plus what the running steps add and one step for each
    hold that expired. Nothing is dropped, and the order within a stream does not change. The end of a request, the end
    of a segment and clean-up are never held.
Why:
    Upstream's queue is first in, first out, and neither it nor the chunks in shared memory have a bound. One slow
    receiver delays the chunks of all streams, and memory grows as long as it is slow.
Why not a hook:
    The queue is a private member, and upstream's scheduler has no hook that decides whether a stream may run.
Scope:
    Stage processes with async-chunk, an autoregressive scheduler, model runner v1 and a next stage. A hold asks
    upstream to skip a running request for one step (``next_decode_eligible_step``). The request stays in the running
    queue, so that abort, preemption, statistics and its KV blocks remain upstream's. No stream is held where this was
    not found to be safe, and the state gives the reason: schedulers other than ``OmniARScheduler`` and
    ``OmniARAsyncScheduler`` themselves (coupled streams must run in one step), paired requests, LoRA (vLLM counts only
    the adapters of scheduled requests), speculative decoding, transfer of KV cache, pipeline parallelism.
    There is one save thread, as upstream has. A slow send delays the other streams while it lasts. A put that hangs
    stops all audio of its stage, and its text once ``max_bytes`` is reached. From 0.32 on a stage whose processor takes
    the requests of a step together (Fish Audio) is not applicable, because its tasks do not belong to one stream. The
    model runner's own save queue, which synchronous full payloads and model runner v2 use, is not covered. After an
    exception of the patch, in any thread, all tasks are in one deque again, in order of arrival, and no stream is held.
Fragility:
    Replaces the adapter's deque by an object with the four operations that upstream uses, right after the adapter is
    made. ``save_loop`` and the adapter's constructor are pinned. Relies on ``Scheduler.schedule`` to count
    ``current_step`` and to skip requests by ``next_decode_eligible_step``, so that body is pinned too. Unfetched chunks
    are found by the names that ``SharedMemoryConnector`` gives its segments, and their sizes come from its figures, so
    ``put`` is pinned, and so is the function that numbers the chunks. A payload may wait without a copy on a GPU stage
    because of how the runner makes it (`payload`), so the functions that slice it are pinned. No class declares
    ``omni_final_stage_id`` of a request's additional information, nor from 0.32 on
    ``custom_process_next_stage_input_batch_func`` of the adapter. A task has ``request``, ``multimodal_output``,
    ``cleanup_shm`` or ``release_shm``. One of another shape makes the patch step aside. Set: ``_pending_save_reqs`` of
    the adapter, ``next_decode_eligible_step`` of a request, an attribute of the patch on the scheduler.
Upstream thread:
    vllm-omni PR #3690 (a global semaphore, closed), vllm-omni issue #3535 (credits per stream, proposed).
Remove when:
    Upstream bounds its save queue per stream, in every supported release.
"""

from __future__ import annotations

from pydantic import ByteSize, Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Process, Relies, Wrap


class SaveQueueOptions(Options):
    """The limits. With null there is no limit, as upstream."""

    max_bytes: ByteSize | None = Field(
        default=ByteSize(256 * 2**20),
        ge=2**16,
        description="payload of all streams of a stage together: queued, being sent and, if it is in shared memory, "
        "not fetched. Above this limit the streams with the most are left out of steps",
    )
    max_tasks: int | None = Field(
        default=None,
        ge=1,
        description="queued chunks of all streams of a stage together. Above this limit the streams with the most are "
        "left out of steps",
    )
    max_hold_s: float = Field(
        default=5.0,
        ge=0.01,
        le=3600.0,
        description="seconds after which a held stream takes one step, whatever is queued",
    )


BASE = "vllm_omni.distributed.omni_connectors.transfer_adapter.base"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
SHARED_MEMORY = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"

SEAMS: tuple[AnySeam, ...] = (
    Wrap(
        "vllm_omni.core.sched.omni_scheduler_mixin",
        "OmniSchedulerMixin._init_omni_io_scheduling_state",
        wrapper="wrapped_scheduler_made",
    ),
    Wrap("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler.schedule", wrapper="wrapped_schedule"),
    Relies("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Relies(BASE, "OmniTransferAdapterBase.__init__"),
    Relies(BASE, "OmniTransferAdapterBase.save_loop"),
    Relies(ADAPTER, "OmniChunkTransferAdapter._send_single_request_for_generation"),
    Relies(SHARED_MEMORY, "SharedMemoryConnector.put"),
    Relies("vllm_omni.utils.mm_outputs", "to_payload_element"),
    Relies("vllm_omni.utils.mm_outputs", "_to_cpu"),
    Relies("vllm_omni.core.sched.omni_ar_scheduler", "OmniARScheduler"),
    Relies("vllm_omni.request", "OmniRequest"),
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
        Counter("held_steps", "steps that held streams were left out of"),
        Counter("expired_holds", "holds that ended after max_hold_s, for one step"),
        Counter("owned_payloads", "queued payloads that were copied, because they would have kept much more memory"),
        Counter("max_queued_tasks", "most save tasks queued and being sent", is_maximum=True),
        Counter(
            "max_outstanding_bytes",
            "most bytes queued, being sent and, as of the last check, not fetched",
            is_maximum=True,
        ),
    ),
    rows=(
        Fit(releases=("0.28.0", "0.30.0"), seams=SEAMS),
        Fit(releases=("0.32.0rc1",), preview=True, seams=SEAMS),
    ),
)
