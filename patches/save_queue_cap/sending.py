"""Around a send while the queue is managed: measure it, and see what of the stream lies in shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from omni_fastpath.ledger import logger

from .payload import KeptPayload, give
from .queue import SaveQueue
from .receivers import has_receiver
from .tasks import stream_of
from .unfetched import Chunks, size_of
from .upstream import PAYLOAD


def make_again(queue: SaveQueue, task: dict[str, Any]) -> None:
    """Make tensors again of what was copied. What cannot be made fails its request, as a send that fails."""
    try:
        task[PAYLOAD] = give(task[PAYLOAD])
    except Exception as error:
        queue.step_aside(error)
        task[PAYLOAD] = give(task[PAYLOAD])


def send_managed(
    wrapped: Callable[..., Any], adapter: Any, args: Any, kwargs: Any, queue: SaveQueue, task: dict[str, Any]
) -> Any:
    """Upstream's send of one task. Nothing of ours fails it but a payload that cannot be made again."""
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
        if type(task.get(PAYLOAD)) is KeptPayload:
            make_again(queue, task)
        return wrapped(*args, **kwargs)
    finally:
        took = time.monotonic() - began
        has_put = is_unfetched = False
        try:
            is_cleanup = "request" not in task
            # The end of a request clears upstream's counter with the send.
            has_put = not is_cleanup and (task["is_finished"] or adapter.put_req_chunk.get(stream, 0) != number)
            if chunks is not None:
                if has_put and not has_receiver(task["request"], adapter.connector.stage_id):
                    queue.receivers.note_without(stream)
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
