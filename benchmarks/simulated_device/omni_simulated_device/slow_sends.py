"""Chunks that take long to send: a benchmark's slow receiver or network, in a stage process or in a test.

``OMNI_SIMULATED_DEVICE_SLOW_SENDS`` holds a JSON object, or a list of them::

    {"stage": 0, "match": "slow", "ms": 200}

Sends of ``stage`` for streams whose external request id contains ``match`` take ``ms`` milliseconds longer. Without the
variable nothing is touched.

The time is spent in the function that ``SharedMemoryConnector.put`` writes the segment with, inside ``put``, while the
segment is not there yet. ``put`` itself stays upstream's object: a patch that pins its body would refuse another.
"""

import functools
import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

from omni_simulated_device import SLOW_SENDS_VARIABLE

CONNECTOR_MODULE = "vllm_omni.distributed.omni_connectors.connectors.shm_connector"

_STAGE_PROCESS = "StageEngineCoreProc_stage"
_KEYS = frozenset({"stage", "match", "ms"})
_armed = False

Delay = Callable[[str, int], float]
"""Seconds that a send takes longer, from the stream's external request id and the sending stage."""


def arm() -> None:
    """Do what the variable says, in a stage process; may be called many times.

    Raises:
        ValueError: The variable cannot be used.
    """
    global _armed  # noqa: PLW0603 - one process, one arming
    raw = os.environ.get(SLOW_SENDS_VARIABLE)
    if not raw or _armed or not multiprocessing.current_process().name.startswith(_STAGE_PROCESS):
        return
    _armed = True
    # omni-fastpath's own dependency; whoever sets the variable measures it, so that it is there.
    from wrapt import register_post_import_hook

    for each in _settings(raw):
        delay = for_streams(str(each["match"]), float(each["ms"]) * 1e-3, stage=int(each["stage"]))
        register_post_import_hook(functools.partial(slow_down, delay), CONNECTOR_MODULE)


def _settings(raw: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{SLOW_SENDS_VARIABLE}: not valid JSON: {error}") from error
    settings = found if isinstance(found, list) else [found]
    for each in settings:
        if not isinstance(each, dict) or set(each) != _KEYS:
            allowed = "an object, or a list of them, with stage, match and ms"
            raise ValueError(f"{SLOW_SENDS_VARIABLE}: found {raw}, allowed: {allowed}")
    return settings


def for_streams(match: str, seconds: float, *, stage: int) -> Delay:
    """A delay of *seconds* for the sends of *stage* whose stream's id contains *match*."""
    return lambda stream, sender: seconds if sender == stage and match in stream else 0.0


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
