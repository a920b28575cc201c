"""What the patch needs of upstream, found by looking: names differ between releases, and some have no such thing."""

from __future__ import annotations

import sys
from typing import Any


def _payload() -> str:
    """The key of a save task with its payload: the pooler's output, where runners have no other for the next stage."""
    # Where vLLM-Omni is not loaded, there are no tasks of its own either.
    if "vllm_omni" in sys.modules:
        from vllm_omni.outputs import OmniModelRunnerOutput  # noqa: PLC0415 - as said above

        if "inter_stage_outputs" not in OmniModelRunnerOutput.__dataclass_fields__:
            return "pooling_output"
    return "multimodal_output"


PAYLOAD = _payload()
"""The key of a save task with its payload."""


def key_prefix(task: Any) -> str:
    """Where the chunks of a task without a request are: external request id, stage, and no number.

    Raises:
        KeyError: It is of a shape that was not read.
    """
    if "cleanup_shm" in task:
        prefix: str = task["cleanup_shm"][0]
        return prefix
    released: str = task["release_shm"]
    return released.removesuffix("_")


def may_hold(scheduler: Any) -> bool:
    """Whether vLLM's scheduler leaves a running request out of a step when it is asked to."""
    return hasattr(scheduler, "current_step")


def has_locks(adapter: Any) -> bool:
    """Whether two threads may send: what the adapter keeps of a sender is behind a lock."""
    return hasattr(adapter, "_sender_state_lock")


def knows_unfetched(connector: Any) -> bool:
    """Whether a shared memory connector knows which of its segments were not fetched.

    Before it looked for those that are gone it kept the name of each one that it ever put, and nobody took away what an
    aborted request left.
    """
    return hasattr(connector, "reap_consumed")


def sends_batches(adapter: Any) -> bool:
    """Whether one task has the chunks of all requests of a step."""
    return getattr(adapter, "custom_process_next_stage_input_batch_func", None) is not None
