"""A socket is emptied in one go, and a tensor is made of its bytes in one step.

What:
    vLLM's socket reader, and what it does with a message, stay as they are. It asks the same socket for the next
    message: when one stands there it gets it at once; when none does, it waits for one without what ``zmq.asyncio``
    does for each. After ``max_messages`` in one go everybody else on the event loop gets a turn (upstream's reader
    gives none while something stands in the socket). vLLM's decoder stays too, but for what turns a tensor's bytes into
    a tensor: the same values, type and shape, with one copy where upstream makes one and none where it makes none.
Why:
    A future, a callback and four looks at the socket's state a message; four tensors to make one. Beside processing it
    is the largest part of what a raw output costs the orchestrator's thread.
Why not a hook:
    There is none: the reader is a function inside a method, the decoder an attribute.
Scope:
    Orchestrator thread of the API server, clients of one engine core each (``AsyncMPClient`` and what inherits from
    it), in every mode. Clients with data parallelism are left alone, and the state's reason says so. So are tensors
    that come another way than in the message (``mm_tensor_ipc``), and types that numpy has not (bfloat16) where they
    are short.
Fragility:
    Wraps ``_ensure_output_queue_task``, whose body is pinned: it awaits ``resources.output_socket.recv_multipart
    (copy=False)`` and calls ``decoder.decode``. Before that starts, the socket gets a ``recv_multipart`` of ours as an
    attribute of its own, and the decoder another ``msgspec`` decoder in ``decoder.decoder``. The event loop has one
    callback for the socket's descriptor, ours in the place of pyzmq's; it goes when the reader's task ends or is
    cancelled, which is how upstream closes the socket (``BackgroundResources``, pinned). Read: of a client
    ``resources``, ``decoder`` and ``process_engine_outputs``; of ``resources`` ``output_socket`` and
    ``output_queue_task``; of a decoder ``share_mem``, ``oob_tensor_provider``, ``aux_buffers`` and ``ext_hook``. A
    tensor that came inside the message owns memory that Python allocated, not torch: it cannot be resized in place.
Upstream thread:
    vllm-omni issue #4561 (the reporter's primary cause: the expensive CPU-side output path).
Remove when:
    Upstream's reader takes what stands in the socket without a future each, and its decoder makes a tensor in one step.
"""

from __future__ import annotations

from pydantic import Field

from omni_fastpath.declare import AnySeam, Call, Counter, Fit, Options, Patch, Pin, Process, Wrap

CORE_CLIENT = "vllm.v1.engine.core_client"
SERIAL = "vllm.v1.serial_utils"


class ReaderOptions(Options):
    """Values of ``lean_reader``."""

    max_messages: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="messages that a reader takes from its socket before everybody else on the event loop gets a turn",
    )


def _seams(*, start: str, close: str, decoder: str) -> tuple[AnySeam, ...]:
    """With the bodies that differ: the reader's start, a client's end, and how a decoder is made."""
    return (
        Wrap(
            CORE_CLIENT,
            "AsyncMPClient._ensure_output_queue_task",
            ("self",),
            wrapper="wrapped_ensure_output_queue_task",
            fingerprints=(start,),
        ),
        # How the socket is closed: at once, and the reader's task cancelled with it.
        Pin(CORE_CLIENT, "BackgroundResources.__call__", ("self",), fingerprints=(close,)),
        # What our tensors are made instead of, and what we hand on to.
        Pin(
            SERIAL,
            "MsgpackDecoder.__init__",
            ("self", "t", "share_mem", "oob_tensor_provider"),
            fingerprints=(decoder,),
        ),
        Pin(SERIAL, "MsgpackDecoder.decode", ("self", "bufs"), fingerprints=("67c747c9df14371f",)),
        Pin(SERIAL, "MsgpackDecoder.dec_hook", ("self", "t", "obj"), fingerprints=("a15a4e469735eb19",)),
        Pin(SERIAL, "MsgpackDecoder._decode_tensor", ("self", "arr"), fingerprints=("5d9d8f0443c5869d",)),
        Call(SERIAL, "MsgpackDecoder.ext_hook", ("self", "code", "data")),
    )


PATCH = Patch(
    name="lean_reader",
    summary="a socket is emptied in one go; a tensor is made of its bytes in one step",
    processes=frozenset({Process.SERVER}),
    docs=__doc__,
    default_on=False,
    options=ReaderOptions,
    counters=(
        Counter("messages", "messages taken from the sockets", moves_with="vllm:request_success_total"),
        Counter("at_once", "of these, messages that stood there when the reader asked, so that it did not wait"),
        Counter("tensors", "tensors made in one step"),
        Counter("clients", "clients whose socket it reads"),
    ),
    rows=(
        Fit(
            releases=("0.22.0",),
            seams=_seams(start="4c8d3aad1881707d", close="09fd592e028e3713", decoder="1d17c6191566ac67"),
        ),
        Fit(
            releases=("0.24.0", "0.26.0"),
            seams=_seams(start="4c8d3aad1881707d", close="c80eb9132bcf8b7d", decoder="d0e59100f29588c4"),
        ),
        Fit(
            releases=("0.28.0", "0.30.0"),
            seams=_seams(start="b8acc61cdfb9da48", close="c80eb9132bcf8b7d", decoder="d0e59100f29588c4"),
        ),
        Fit(
            releases=("0.32.0rc1",),
            preview=True,
            seams=_seams(start="b8acc61cdfb9da48", close="00c66677da8f495c", decoder="d0e59100f29588c4"),
        ),
    ),
)
