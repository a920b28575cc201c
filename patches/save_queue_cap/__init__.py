"""Chunks on their way to the next stage are served fairly by stream, and bounded in bytes; the producer never blocks.

What:
    With async-chunk a stage hands every step's payloads, as tasks, to a save thread, which sends them to the next
    stage. Each stream gets a queue of its own; they are served in the order of arrival, but for streams whose sends
    are slow, which wait until the others have had as much of the thread's time, or have nothing to send.
    While all together are over ``max_bytes`` (queued, being sent and, over shared memory, put and not fetched) the
    streams with the most are held: left out of the next steps until what is on its way has drained. A hold ends after
    ``max_hold_s`` at the latest: the stream takes one step and may be held anew. So there is at most twice
    ``max_bytes``, besides what the steps in flight bring and one step for each hold that expired.
    Nothing is dropped and the order within a stream does not change; ends of requests and of segments and clean-up
    always pass.
Why:
    Upstream's queue is one first-in-first-out without a bound, and so is what lies behind it in shared memory. One
    receiver that is slow makes everybody's chunks wait, and memory grows for as long as it lasts.
Why not a hook:
    The queue is a private member, and upstream's scheduler asks nobody whether a stream may run.
Scope:
    Stage processes with async-chunk, an autoregressive scheduler, model runner v1 and a next stage. What is asked of
    upstream for a hold is to skip a running request for one step (``next_decode_eligible_step``): it stays in the
    running queue, so that abort, preemption, statistics and its KV blocks remain upstream's. No stream is held, and
    the state says why, where that was not read to be safe: schedulers other than ``OmniARScheduler`` and
    ``OmniARAsyncScheduler`` themselves (coupled streams must run in one step), paired requests, LoRA (vLLM counts
    adapters of scheduled requests alone), speculative decoding, transfer of KV cache, pipeline parallelism.
    There is one save thread, as upstream's: a slow send delays the others for as long as it lasts, and a put that hangs
    stops all audio of its stage, and no text until ``max_bytes`` is reached. From 0.32 on a stage whose processor takes
    a step's requests together (Fish Audio) is not applicable: its tasks are of no one stream. Not covered: the model
    runner's own save queue, which synchronous full payloads and model runner v2 use.
    After an exception of ours, in whatever thread, everything that waits stands in one deque again, in the order of
    arrival, and no stream is held.
Fragility:
    Replaces the adapter's deque by an object with the four operations that upstream uses, right after the adapter is
    made; ``save_loop`` and the adapter's constructor are pinned. Relies on ``Scheduler.schedule`` to count
    ``current_step`` and to skip by ``next_decode_eligible_step``; that body is pinned too. Unfetched chunks are looked
    up under the names that ``SharedMemoryConnector`` gives its segments, and their sizes are taken from its figures:
    ``put`` is pinned, and so is what numbers chunks. That a payload may wait as it is on a GPU stage follows from how
    the runner makes it (`payload`): what it slices is pinned.
    No class declares ``omni_final_stage_id`` of a request's additional information, and from 0.32 on
    ``custom_process_next_stage_input_batch_func`` of the adapter. A task has ``request``, ``multimodal_output``,
    ``cleanup_shm`` or ``release_shm``; one of another shape makes the queue step aside. Set: ``_pending_save_reqs`` of
    the adapter, ``next_decode_eligible_step`` of a request, an attribute of the patch on the scheduler.
Upstream thread:
    vllm-omni PR #3690 (a global semaphore, closed), vllm-omni issue #3535 (credits per stream, proposed).
Remove when:
    Upstream bounds its save queue per stream, in every supported release.
"""

from __future__ import annotations

from pydantic import ByteSize, Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Reads, Wrap


class SaveQueueOptions(Options):
    """The limits. A limit that is null is none, as upstream."""

    max_bytes: ByteSize | None = Field(
        default=ByteSize(256 * 2**20),
        ge=2**16,
        description="payload of all streams of a stage together, queued, being sent and (shared memory) not fetched, "
        "over which the streams with the most are left out of steps",
    )
    max_tasks: int | None = Field(
        default=None,
        ge=1,
        description="queued chunks of all streams of a stage together, over which the streams with the most are left "
        "out of steps",
    )
    max_hold_s: float = Field(
        default=5.0,
        ge=0.01,
        le=3600.0,
        description="seconds after which a held stream takes one step whatever is on its way",
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
    Pin("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Pin(BASE, "OmniTransferAdapterBase.__init__"),
    Pin(BASE, "OmniTransferAdapterBase.save_loop"),
    Pin(ADAPTER, "OmniChunkTransferAdapter._send_single_request_for_generation"),
    Pin(SHARED_MEMORY, "SharedMemoryConnector.put"),
    Pin("vllm_omni.utils.mm_outputs", "to_payload_element"),
    Pin("vllm_omni.utils.mm_outputs", "_to_cpu"),
    Reads(
        "vllm_omni.core.sched.omni_ar_scheduler",
        "OmniARScheduler",
        ("chunk_transfer_adapter", "vllm_config", "use_v2_model_runner", "running", "current_step"),
    ),
    Reads(
        "vllm_omni.request",
        "OmniRequest",
        (
            *("request_id", "external_req_id", "num_computed_tokens", "additional_information"),
            "next_decode_eligible_step",
        ),
    ),
    Reads(
        ADAPTER,
        "OmniChunkTransferAdapter",
        (
            *("save_thread", "stop_event", "connector", "custom_process_next_stage_input_func", "_sender_tokens"),
            *("put_req_chunk", "_pending_save_reqs"),
        ),
    ),
    Reads(SHARED_MEMORY, "SharedMemoryConnector", ("stage_id", "_metrics")),
)

PATCH = Patch(
    name="save_queue_cap",
    summary="chunks on their way to the next stage are served fairly by stream, and bounded in bytes",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    options=SaveQueueOptions,
    default_on=False,
    taken_off="taken_off",
    counters=(
        Counter("tasks", "save tasks that went through the queue"),
        Counter("slow_sends", "sends that took 100 ms or more"),
        Counter("holds", "holds that began: a stream left out of steps until what is on its way has drained"),
        Counter("held_steps", "steps that held streams were left out of"),
        Counter("expired_holds", "holds that max_hold_s ended, each for one step"),
        Counter("owned_payloads", "payloads that waited over a step: what lay in memory of others was copied"),
        Counter("max_queued_tasks", "most save tasks queued and being sent", is_maximum=True),
        Counter(
            "max_outstanding_bytes",
            "most bytes queued, being sent and, as far as was looked, not fetched",
            is_maximum=True,
        ),
    ),
    rows=(
        Fit(releases=("0.28.0", "0.30.0"), seams=SEAMS),
        Fit(releases=("0.32.0rc1",), preview=True, seams=SEAMS),
    ),
)
