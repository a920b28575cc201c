"""Chunks on their way to the next stage are bounded, per stream first; the producer never blocks.

What:
    With async-chunk a stage hands every step's payloads, as tasks, to a save thread, which sends them to the next
    stage. While all is calm its queue stays upstream's own: one deque in the order of arrival. Calm means: no send is
    slow, little is queued and unfetched, and the oldest unsent task is younger than four times ``per_stream_tasks``
    steps less those in flight. Else every stream gets a queue, served fairly by measured send time. Where the connector
    and the stage's input processor are known to bear it, a helper thread serves the others while a send is slow, and
    streams known to be slow are left to it. When it has been quiet for a while the queue is one again.
    ``holds`` says whether a stream may also be held: left out of the next steps until it has drained. ``never``:
    nobody. ``bytes``, the default: those with the most on their way, while all together are over ``total_bytes``.
    ``always``: those too, also with all together over ``total_tasks``; a stream with ``per_stream_tasks`` save tasks
    queued, in flight and in placeholders (until three quarters of them); and one with ``unfetched_chunks`` chunks in
    shared memory that its receiver has not fetched. The two limits on tasks are for streams whose sends are slow, and
    for all while slow sends keep every lane; else all are behind alike, for want of processor time, and four times as
    many hold. A hold ends after ``max_hold_s`` at the latest: a stream that is still over takes one step and is
    counted.
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
    running queue, so that abort, preemption, statistics and its KV blocks remain upstream's. Nobody is held, and the
    state says why, where that was not read to be safe: schedulers other than ``OmniARScheduler`` and
    ``OmniARAsyncScheduler`` themselves (coupled streams must run in one step), paired requests, LoRA (vLLM counts
    adapters of scheduled requests alone), speculative decoding, transfer of KV cache, pipeline parallelism. Not held
    for tasks: a stream in the middle of its prompt. Refused at the stage's start, with ``holds: always``:
    ``per_stream_tasks`` below 3 with async scheduling (two steps are in flight always) and pipeline parallelism.
    With one lane (up to 0.26, whose adapter has no locks; other connectors and input processors than those read for
    two) a slow send delays the others by itself, once for each turn of its stream: turns are shared by time, and
    nothing overtakes a send that has begun. On 0.22 no stream is held: its vLLM skips no running request. Up to 0.28
    chunks that were not fetched are not counted, and limits on them do nothing: upstream keeps the name of each segment
    that it ever put, and leaves there what an aborted request's receiver did not fetch. From 0.32 on a stage whose
    processor takes a step's requests together (Fish Audio) is not applicable: its tasks are of no one stream.
    Not covered: the model runner's own save queue, which synchronous full payloads and model runner v2 use.
    An exception of ours, in whatever thread, makes the queue step aside, once and for good, in words: everything that
    waits stands in one deque again, in the order of arrival, and one lane sends it.
Fragility:
    Replaces the adapter's deque by an object with the four operations that upstream uses, right after the adapter is
    made, which the schedulers' constructors do up to 0.26; ``save_loop`` and the adapter's constructor are pinned.
    Relies on ``Scheduler.schedule`` to count ``current_step`` and to skip by ``next_decode_eligible_step``; that body
    is pinned too. Unfetched chunks are looked up under the names that ``SharedMemoryConnector`` gives its segments and
    in its own list of them; ``put`` and ``reap_consumed`` are pinned. That a payload may wait as it is follows from how
    the runner makes it (`payload`): what it slices is pinned.
    Read: of the scheduler ``chunk_transfer_adapter``, ``vllm_config``, ``use_v2_model_runner``, ``num_spec_tokens``,
    ``running`` and ``current_step``; of a request ``request_id``, ``external_req_id``, ``num_output_placeholders``,
    ``num_computed_tokens``, ``is_prefill_chunk`` and ``additional_information`` (``omni_final_stage_id``); of the
    adapter ``save_thread``, ``_save_cond``, ``stop_event``, ``connector``, ``custom_process_next_stage_input_func``,
    ``custom_process_next_stage_input_batch_func``, ``_sender_tokens``, ``_sender_state_lock`` and ``put_req_chunk``; of
    the connector ``stage_id``, ``_metrics``, ``_pending_keys`` and ``_pending_keys_lock``; of a task ``request``,
    ``multimodal_output`` (0.22: ``pooling_output``), ``is_finished``, ``cleanup_shm`` and ``release_shm``; one of
    another shape makes the queue step aside. Set: ``_pending_save_reqs`` of the adapter, ``next_decode_eligible_step``
    of a request, an attribute of ours on the scheduler.
Upstream thread:
    vllm-omni PR #3690 (a global semaphore, closed), vllm-omni issue #3535 (credits per stream, proposed).
Remove when:
    Upstream bounds its save queue per stream, in every supported release.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from omni_fastpath.declare import AnySeam, Counter, Fit, Options, Patch, Pin, Process, Wrap


class SaveQueueOptions(Options):
    """The limits. A limit that is null is none, as upstream."""

    per_stream_tasks: int | None = Field(
        default=32,
        ge=1,
        description="save tasks of one stream, queued, in flight and in placeholders, from which on it is held with "
        "holds: always while its sends, or those that keep every lane, are slow, and at four times as many else; at "
        "least 3 with async scheduling then",
    )
    unfetched_chunks: int | None = Field(
        default=None,
        ge=1,
        description="chunks of one stream that its receiver has not fetched, from which on it is held with holds: "
        "always; shared memory only. It ties a stage to the pace of the next one, text included",
    )
    total_tasks: int | None = Field(
        default=8192,
        ge=1,
        description="save tasks of all streams of a stage together, from which on those with the most are held with "
        "holds: always, at four times as many while nobody is slow; from twice as many on streams have queues of their "
        "own",
    )
    total_bytes: ByteSize | None = Field(
        default=ByteSize(256 * 2**20),
        ge=2**16,
        description="payload of all streams of a stage together, queued and (shared memory) not fetched, from which on "
        "the streams with the most are held",
    )
    holds: Literal["never", "bytes", "always"] = Field(
        default="bytes",
        description="who is left out of steps. never: nobody, streams are only served fairly. bytes: those with the "
        "most while total_bytes is reached; text goes on until then. always: a stream that is over any limit, and its "
        "text waits with it",
    )
    max_hold_s: float = Field(
        default=5.0,
        ge=0.01,
        le=3600.0,
        description="seconds after which a hold ends for one step whatever is queued",
    )


SCHEDULER = "vllm_omni.core.sched.omni_ar_scheduler"
GENERATION = "vllm_omni.core.sched.omni_generation_scheduler"
MIXIN = "vllm_omni.core.sched.omni_scheduler_mixin"
BASE = "vllm_omni.distributed.omni_connectors.transfer_adapter.base"
ADAPTER = "vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter"
SHARED_MEMORY = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"
ELEMENT = ("element", "idx", "start", "end", "pass_lists_through", "seq_len", "scheduled_seq_len")


def steps(*parameters: str, body: str | None = None) -> tuple[AnySeam, ...]:
    """Where a step begins, and vLLM's own beginning of it with its body where streams are held."""
    ours = Wrap(SCHEDULER, "OmniARScheduler.schedule", ("self", *parameters), wrapper="wrapped_schedule")
    if body is None:
        return (ours,)
    theirs = Pin("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("self", *parameters), fingerprints=(body,))
    return ours, theirs


def lane(init: str, loop: str, *, send: str | None = None, generation: str | None = None) -> tuple[AnySeam, ...]:
    """The save thread: how it is made, its loop, and what it sends a task with, in one function or in two."""
    qualname = "OmniChunkTransferAdapter._send_single_request"
    sent = (send,) if send is not None else ()
    wrap = Wrap(ADAPTER, qualname, ("self", "task"), wrapper="wrapped_send_single_request", fingerprints=sent)
    found: tuple[AnySeam, ...] = (
        wrap,
        Pin(BASE, "OmniTransferAdapterBase.__init__", ("self", "config"), fingerprints=(init,)),
        Pin(BASE, "OmniTransferAdapterBase.save_loop", ("self",), fingerprints=(loop,)),
    )
    if generation is None:
        return found
    inner = Pin(ADAPTER, f"{qualname}_for_generation", ("self", "task", "sender_token"), fingerprints=(generation,))
    return *found, inner


def shared_memory(put: str, reap: str, *parameters: str) -> tuple[AnySeam, ...]:
    """What tells of chunks that were not fetched."""
    arguments = ("self", "from_stage", "to_stage", "put_key", "data")
    return (
        Pin(SHARED_MEMORY, "SharedMemoryConnector.put", arguments, fingerprints=(put,)),
        Pin(SHARED_MEMORY, "SharedMemoryConnector.reap_consumed", ("self", *parameters), fingerprints=(reap,)),
    )


def payload(element: str = "321071d1613e7f22", parameters: tuple[str, ...] = ELEMENT) -> tuple[AnySeam, ...]:
    """What a payload is made by."""
    outputs = "vllm_omni.utils.mm_outputs"
    return (
        Pin(outputs, "to_payload_element", parameters, fingerprints=(element,)),
        Pin(outputs, "_to_cpu", ("value",), fingerprints=("2e8922bdaa3cbf98",)),
    )


MADE = "wrapped_scheduler_made"
MADE_WITH_SCHEDULER = (
    Wrap(SCHEDULER, "OmniARScheduler.__init__", ("self", "args", "kwargs"), wrapper=MADE),
    Wrap(GENERATION, "OmniGenerationScheduler.__init__", ("self", "args", "kwargs"), wrapper=MADE),
)
MADE_WITH_STATE = (Wrap(MIXIN, "OmniSchedulerMixin._init_omni_io_scheduling_state", ("self",), wrapper=MADE),)
"""What makes the adapter, in both kinds of scheduler."""

UNCOUNTED = "unfetched chunks are not counted"

PATCH = Patch(
    name="save_queue_cap",
    summary="chunks on their way to the next stage are bounded, per stream first",
    processes=frozenset({Process.STAGE}),
    docs=__doc__,
    options=SaveQueueOptions,
    default_on=False,
    counters=(
        Counter("tasks", "save tasks that went through the queues"),
        Counter("managed", "times that one plain queue no longer did, and streams got queues of their own"),
        Counter("helpers", "helper threads, each for the slow sends of one stage"),
        Counter("stepped_aside", "1 after an exception of ours: upstream's order from then on"),
        Counter("holds", "holds that began: a stream left out of steps until it has drained"),
        Counter("held_steps", "steps that held streams were left out of"),
        Counter("holds_for_tasks", "of the holds, those for per_stream_tasks"),
        Counter("holds_for_unfetched", "of the holds, those for unfetched_chunks"),
        Counter("holds_for_total", "of the holds, those for total_tasks or total_bytes"),
        Counter("expired_holds", "holds that max_hold_s ended, each for one step"),
        Counter(
            "given_up", "holds for unfetched chunks of which none was fetched meanwhile: held no more until one is"
        ),
        Counter("copied_tensors", "tensors that were copied because what they lay in is not the queue's"),
        Counter("abandoned_chunks", "chunks of ended requests that nobody fetched for a minute; they count no longer"),
        Counter("max_queued_tasks", "most save tasks queued and in flight", is_maximum=True),
        Counter("max_stream_tasks", "most save tasks of one stream queued and in flight", is_maximum=True),
        Counter(
            "max_outstanding_bytes",
            "most bytes queued, in flight and, as far as was looked, not fetched",
            is_maximum=True,
        ),
    ),
    rows=(
        Fit(
            releases=("0.22.0",),
            note="no limit holds a stream, they are only served fairly",
            seams=(
                *MADE_WITH_SCHEDULER,
                *steps(),
                *lane("ebf49e012b408f81", "a7efcf538855bd16", send="ee2437fb3cfc673b"),
                *payload("14e29ac395976dc5", ELEMENT[:-1]),
            ),
        ),
        Fit(
            releases=("0.24.0",),
            note=f"one lane, {UNCOUNTED}",
            seams=(
                *MADE_WITH_SCHEDULER,
                *steps("throttle_prefills", body="009b19f9b213e1f7"),
                *lane("ebf49e012b408f81", "a7efcf538855bd16", send="1b53cd9106ca4d1d"),
                *payload(),
            ),
        ),
        Fit(
            releases=("0.26.0",),
            note=f"one lane, {UNCOUNTED}",
            seams=(
                *MADE_WITH_SCHEDULER,
                *steps("throttle_prefills", body="fc590678e5063d65"),
                *lane("ebf49e012b408f81", "a7efcf538855bd16", send="d382effbd091d3dd"),
                *payload(),
            ),
        ),
        Fit(
            releases=("0.28.0",),
            note=UNCOUNTED,
            seams=(
                *MADE_WITH_STATE,
                *steps("throttle_prefills", body="dd911012f4e5bf46"),
                *lane("3b86a77d007eb0fb", "80f9bc6b6b75d7a7", generation="5871625bfbb2225a"),
                *payload(),
            ),
        ),
        Fit(
            releases=("0.30.0",),
            seams=(
                *MADE_WITH_STATE,
                *steps("throttle_prefills", body="16ba8988b815426e"),
                *lane("e474ea36bed153c5", "95cc6e48db85a8c7", generation="5494f3e7eb7b0afd"),
                *shared_memory("d2a7f9701675cc2a", "db338defcdf0b3de"),
                *payload(),
            ),
        ),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            seams=(
                *MADE_WITH_STATE,
                *steps("throttle_prefills", body="65057b5422529a4b"),
                *lane("e474ea36bed153c5", "95cc6e48db85a8c7", generation="87b84d828753112b"),
                *shared_memory("a18609d5dd1c3a24", "79cd752eaddd1f59", "max_keys"),
                *payload(),
            ),
        ),
    ),
)
