"""The slot of ``lean_reader``: the start of a client's socket reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq.asyncio
from vllm.v1.engine.core_client import DPAsyncMPClient
from vllm.v1.serial_utils import MsgpackDecoder

from omni_fastpath.declare import State
from omni_fastpath.ledger import runtime

from .aside import step_aside
from .taking import Taker
from .tensors import decodes_as_upstream, make_lean

_runtime = runtime("lean_reader")


def wrapped_ensure_output_queue_task(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
    """Start the reader as upstream does, once; before that, let the client's socket and decoder be ours."""
    if instance.resources.output_queue_task is not None or _runtime.has_failed:
        wrapped(*args, **kwargs)
        return
    taker: Taker | None = None
    try:
        taker = _prepared(instance)
    except Exception as error:
        step_aside("preparing a client", error)
    try:
        wrapped(*args, **kwargs)
    except BaseException:  # no event loop runs here, for one; whoever comes next starts it as if nothing had been
        if taker is not None:
            vars(instance.resources.output_socket).pop("recv_multipart", None)
        raise
    task: Any = instance.resources.output_queue_task
    if taker is not None:
        task.add_done_callback(taker.leave)


def _prepared(client: Any) -> Taker | None:
    """What takes the client's messages from now on; None for a client that is left alone."""
    socket, decoder = client.resources.output_socket, client.decoder
    reason = _why_not(client, socket)
    if reason is not None:
        if not _runtime.counters["clients"]:
            _runtime.report(State.NOT_APPLICABLE, reason)
        return None
    taker = Taker(socket, _runtime.options.max_messages)
    vars(socket)["recv_multipart"] = taker.recv_multipart
    if type(decoder) is MsgpackDecoder and decodes_as_upstream(decoder):
        make_lean(decoder)
    _runtime.counters["clients"] += 1
    if _runtime.entry.state is State.NOT_APPLICABLE:
        _runtime.report(State.APPLIED, "clients without data parallelism are read; the others are left alone")
    return taker


def _why_not(client: Any, socket: Any) -> str | None:
    if isinstance(client, DPAsyncMPClient) or hasattr(type(client), "process_engine_outputs"):
        return "a stage's client has data parallelism, and is left alone"
    if type(socket) is not zmq.asyncio.Socket or "recv_multipart" in vars(socket):
        return "a stage's client has a socket that is not vLLM's own, and is left alone"
    return None
