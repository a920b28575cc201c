"""What of upstream's objects is read, by names that are the same on every release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

_LOOPBACK = ("127.", "localhost", "::1")


def audio_frames(pool: Any) -> dict[str, Any] | None:
    """Upstream's record of the audio frames of each request of a stage whose audio goes to the user; else None.

    A request is in it from its first audio until the stage ends it.
    """
    return pool._audio_frames_by_request if _gives(pool) == "audio" else None


def first_texts(pool: Any) -> dict[str, Any] | None:
    """Upstream's record of who has had a first text of a stage whose text goes to the user; else None."""
    return pool._non_empty_first_output_timestamps_by_request if _gives(pool) == "text" else None


def _gives(pool: Any) -> str | None:
    """What a stage gives the user; None for nothing."""
    return getattr(pool.stage_client, "final_output_type", None) if pool.final_output else None


def is_on_this_host(client: Any) -> bool:
    """Whether a replica's clock is this host's: it was spawned here, or sends by a local transport, or by none.

    A socket that listens on an address of a network may have anybody behind it; with ``--omni-master-address`` this
    host's own replicas send there, too. The manager of processes is there of spawned ones alone, on every release.
    """
    resources = getattr(client, "resources", None)
    socket = getattr(resources, "output_socket", None)
    if socket is None or getattr(resources, "engine_manager", None) is not None:
        return True
    try:
        address: bytes = socket.LAST_ENDPOINT
    except Exception:  # it is closed
        return False
    parts = urlsplit(address.decode().rstrip("\0"))
    return parts.scheme != "tcp" or (parts.hostname or "").startswith(_LOOPBACK)


def is_waiting(request_state: Any) -> bool:
    """From 0.32 on: whether a first audio that a stage before the codec has made waits to be routed."""
    return request_state.pending_upstream_first_audio is not None


def has_had_first_audio(request_state: Any) -> bool:
    """From 0.32 on: whether that has been routed."""
    return bool(request_state.upstream_first_audio)


def tasks_in(entry: Any) -> Sequence[Any]:
    """The tasks of one entry of a save queue: from 0.32 on it may be those of a step of the scheduler."""
    found: Sequence[Any] = entry["batch"] if isinstance(entry, Mapping) and "batch" in entry else (entry,)
    return found


def payload_of(task: Mapping[str, Any]) -> Any:
    """What a save task sends; None of one that only cleans up."""
    return task.get("multimodal_output", task.get("pooling_output"))  # the second up to 0.22
