"""Chunks that take long to send: a benchmark's slow receiver or network, in a stage process or in a test.

``OMNI_SIMULATED_DEVICE_SLOW_SENDS`` holds a JSON object::

    {"stage": 0, "match": "slow", "ms": 200}

Sends of ``stage`` for streams whose external request id contains ``match`` take ``ms`` milliseconds longer. Without the
variable nothing is touched.

The time is spent in the function that ``SharedMemoryConnector.put`` writes the segment with, inside ``put``, while the
segment is not there yet. ``put`` itself stays upstream's object: a patch that pins its body would refuse another.
"""

import functools
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from omni_simulated_device import SLOW_SENDS_VARIABLE

CONNECTOR_MODULE = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"

_STAGE_PROCESS = "StageEngineCoreProc_stage"
_armed = False

Delay = Callable[[str, int], float]
"""Seconds that a send takes longer, from the stream's external request id and the sending stage."""


class SlowSends(msgspec.Struct, forbid_unknown_fields=True):
    """The variable's value."""

    stage: int
    match: str
    ms: float

    def delay(self, stream: str, sender: int) -> float:
        """As `Delay`."""
        return self.ms * 1e-3 if sender == self.stage and self.match in stream else 0.0


def arm() -> None:
    """Do what the variable says, in a stage process; may be called many times.

    Raises:
        msgspec.DecodeError: The variable cannot be used.
    """
    global _armed  # noqa: PLW0603 - one process, one arming
    raw = os.environ.get(SLOW_SENDS_VARIABLE)
    if not raw or _armed or not multiprocessing.current_process().name.startswith(_STAGE_PROCESS):
        return
    _armed = True
    # omni-fastpath's own dependency; whoever sets the variable measures it, so that it is there.
    from wrapt import register_post_import_hook

    delay = msgspec.json.decode(raw, type=SlowSends).delay
    register_post_import_hook(functools.partial(slow_down, delay), CONNECTOR_MODULE)


def slow_down(delay: Delay, module: Any = None) -> Callable[[], None]:
    """Let sends through shared memory in this process take longer; the result undoes it.

    Args:
        delay: How much longer; called in the sending thread.
        module: The connector's module, where it is being imported just now.
    """
    module = module or importlib.import_module(CONNECTOR_MODULE)
    write = module.shm_write_bytes

    @functools.wraps(write)
    def slow_write(payload: bytes, name: str | None = None) -> dict[str, Any]:
        stream, stage, _ = (name or "_-1_0").rsplit("_", 2)
        if (seconds := delay(stream, int(stage))) > 0:
            time.sleep(seconds)
        found: dict[str, Any] = write(payload, name)
        return found

    def undo() -> None:
        module.shm_write_bytes = write

    module.shm_write_bytes = slow_write
    return undo
