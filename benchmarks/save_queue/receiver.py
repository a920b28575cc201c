"""The next stage's side in a process of its own: it fetches every stream's chunks in order and notes when.

The loop is that of upstream's ``recv_loop``: each pass asks the real connector once for each stream's next chunk, and a
pass without success pauses for a millisecond.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

READY_TIMEOUT_S = 120.0


@dataclass
class Received:
    """What one stream brought.

    Attributes:
        at_s: When each chunk was there, monotonic seconds (one clock for all processes of a machine).
        digest: Of all chunks' content in order; the same request gives the same in every arm.
        finished: Whether the chunk came that ends the request.
    """

    at_s: list[float] = field(default_factory=list)
    digest: str = ""
    finished: bool = False


class Receiver:
    """The process, seen from the stage's; a context manager.

    Made before the stage, while its process has one thread and can be forked: what both import takes ten seconds.

    Args:
        stage: Whose chunks it fetches.
        not_its: Connections of this process that it must not keep open.
    """

    def __init__(self, stage: int, not_its: Sequence[Any] = ()) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, stage, (*not_its, self._pipe))
        self._process = context.Process(target=_serve, args=arguments, name="receiver")
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def wait_until_ready(self) -> None:
        """Return when its imports are done."""
        assert self._pipe.poll(READY_TIMEOUT_S), "the receiver did not start"
        assert self._pipe.recv() == "ready"

    def expect(self, name: str) -> None:
        """Begin to fetch the chunks of a stream."""
        self._pipe.send(name)

    def all_received(self, timeout_s: float) -> dict[str, Received]:
        """Wait until every expected stream has ended and return what they brought; then all is forgotten.

        Raises:
            TimeoutError: One had not ended.
        """
        self._pipe.send(None)
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a stream's end was not received in {timeout_s:.0f} s")
        found: dict[str, Received] = self._pipe.recv()
        return found

    def forget(self) -> None:
        """Fetch nothing more of the streams that have not ended, which were aborted."""
        self._pipe.send("")

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any, stage: int, not_ours: Sequence[Any]) -> None:
    for each in not_ours:
        each.close()
    import vllm_omni  # noqa: F401 - first, as in every upstream process
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector

    connector = SharedMemoryConnector({"stage_id": stage + 1})
    pipe.send("ready")
    streams: dict[str, _Stream] = {}
    open_streams: dict[str, _Stream] = {}
    asked = False
    while True:
        try:
            while pipe.poll(None if not open_streams and not asked else 0):
                name = pipe.recv()
                if name is None:
                    asked = True
                elif not name:
                    streams, open_streams = {}, {}
                else:
                    streams[name] = open_streams[name] = _Stream(name)
        except (EOFError, OSError):
            return
        success = False
        for stream in list(open_streams.values()):
            if stream.fetch(connector, stage):
                success = True
                if stream.received.finished:
                    del open_streams[stream.name]
        if asked and not open_streams:
            pipe.send({name: stream.result() for name, stream in streams.items()})
            streams, asked = {}, False
        elif not success:
            time.sleep(0.001)


class _Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.received = Received()
        self._digest = hashlib.blake2b(digest_size=16)

    def fetch(self, connector: Any, stage: int) -> bool:
        key = f"{self.name}_{stage}_{len(self.received.at_s)}"
        found = connector.get(str(stage), str(stage + 1), key)
        if found is None:
            return False
        self.received.at_s.append(time.monotonic())
        chunk = found[0]
        for text in _plain(chunk):
            self._digest.update(text)
        finished = (chunk.get("meta") or {}).get("finished")
        self.received.finished = finished is not None and bool(finished)
        return True

    def result(self) -> Received:
        self.received.digest = self._digest.hexdigest()
        return self.received


def _plain(value: Any) -> list[bytes]:
    """Everything in a chunk as bytes, keys in their alphabet's order."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key).encode(), *_plain(value[key]))]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in _plain(each)]
    if hasattr(value, "untyped_storage"):
        import torch

        return [str(tuple(value.shape)).encode(), value.contiguous().flatten().view(torch.uint8).numpy().tobytes()]
    return [repr(value).encode()]
