"""The queue in the place of the one of an adapter, with its lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .calm import STEPS_UNLIMITED, Calm
from .credits import LEAST_WITH_ASYNC_SCHEDULING, WIDE
from .fair import FairQueue
from .queue import SaveQueue
from .receivers import Receivers, has_receiver
from .unfetched import Book, Chunks
from .upstream import has_locks, knows_unfetched

if TYPE_CHECKING:
    from . import SaveQueueOptions

AUDITED_PROCESSORS = frozenset(
    {
        "vllm_omni.model_executor.stage_input_processors.qwen3_omni.thinker2talker_async_chunk",
        "vllm_omni.model_executor.stage_input_processors.qwen3_omni.talker2code2wav_async_chunk",
    }
)
"""Input processors read for a helper lane: what they keep, they keep per stream. All others get one lane; Qwen3-TTS's,
for one, goes through all streams to count the active ones."""


CALM_BYTES = 0.875
"""Share of ``total_bytes`` that ends the calm. Until then one deque serves everybody alike, and who is to be held need
not be known. Where 128 streams had 9,900 tasks queued for want of processor time (233 MiB of the default), and the calm
ended at half of it, sorting and weighing cost a lane 36 us a task and the scheduler 2 ms a step."""

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


def attach(
    adapter: Any,
    vllm_config: Any,
    options: SaveQueueOptions,
    counters: dict[str, int],
    *,
    calm: Calm,
    stepped_aside: Callable[[str], None],
) -> SaveQueue:
    """Replace an adapter's queue, before anything is queued, and start the helper where there is one.

    Args:
        adapter: Upstream's, whose save thread runs.
        vllm_config: Of the stage.
        options: The limits.
        counters: The patch's counters.
        calm: Until when it is calm.
        stepped_aside: Told in words why, should the queue step aside.
    """

    def abandoned(count: int) -> None:
        counters["abandoned_chunks"] += count

    counts = obstacle_to_counting(adapter.connector) is None
    on_cpu = vllm_config.device_config.device_type == "cpu"
    fair = FairQueue(counters, keep_all=on_cpu)
    if counts:
        fair.account.chunks = Chunks(fair.table.gone, abandoned, look_at=options.unfetched_chunks)
    queue = SaveQueue(
        fair,
        counters,
        calm=calm,
        book=Book(adapter.connector) if counts else None,
        keep_all=on_cpu,
        is_live=lambda stream: stream in adapter._sender_tokens,
        receivers=Receivers(lambda request: has_receiver(request, adapter.connector.stage_id)) if counts else None,
        stepped_aside=stepped_aside,
    )
    queue.add_lane(adapter.save_thread)
    # Nothing was queued yet: requests come after the scheduler was made.
    adapter._pending_save_reqs = queue
    function = adapter.custom_process_next_stage_input_func
    reads_well = has_locks(adapter) and _is_shared_memory(adapter.connector)
    if reads_well and f"{function.__module__}.{function.__qualname__}" in AUDITED_PROCESSORS:
        _start_helper(adapter, queue)
        counters["helpers"] += 1
    return queue


def obstacle_to_counting(connector: Any) -> str | None:
    """Why chunks that were put and not fetched are not counted; None where they are."""
    if not _is_shared_memory(connector):
        return "the connector is not shared memory"
    return None if knows_unfetched(connector) else "upstream's connector does not know them on this release"


def _is_shared_memory(connector: Any) -> bool:
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import (  # noqa: PLC0415 - heavy, once a stage
        SharedMemoryConnector,
    )

    return type(connector) is SharedMemoryConnector


def _start_helper(adapter: Any, queue: SaveQueue) -> None:
    condition = threading.Condition()
    view = AdapterView(adapter, condition, queue)
    thread = threading.Thread(target=view.run, daemon=True, name="omni-fastpath-save-helper")
    thread.start()
    queue.add_lane(thread, condition)


class AdapterView:
    """The adapter as the helper's ``save_loop`` sees it: all is the adapter's but what the helper sleeps on.

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
