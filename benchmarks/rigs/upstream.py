"""What differs between the releases of vLLM-Omni that the rigs run on, found by looking at what is there.

The rigs are written in the names of 0.30. Another release is first on ``PYTHONPATH`` (`overlays`).
"""

from __future__ import annotations

import inspect
import os
from typing import Any
from unittest import mock

from vllm_omni.engine import orchestrator as _orchestrator

try:
    from vllm_omni.engine.omni_engine_base import OmniEngineBase
except ImportError:  # up to 0.28
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine as OmniEngineBase

try:
    from vllm_omni.engine.async_engine_utils import OutputQueueSink
except ImportError:  # up to 0.30 the orchestrator writes into janus' own asynchronous side
    OutputQueueSink = None

__all__ = ["OmniEngineBase", "drain_in_mode", "give_output", "output_writer"]

_MODE_VARIABLE = "VLLM_OMNI_EVENT_DRIVEN_ORCH"


def output_writer(queue: Any) -> Any:
    """What the orchestrator of a server writes its messages into, over the janus queue of its front end."""
    return queue.async_q if OutputQueueSink is None else OutputQueueSink(queue.sync_q)


def give_output(engine: Any, queue: Any, writer: Any, *, event_driven: bool) -> None:
    """Let an engine that was made without stages read what an orchestrator writes.

    Args:
        engine: An `OmniEngineBase`.
        queue: The janus queue.
        writer: `output_writer` of it.
        event_driven: The engine's mode; 0.28 asks the environment (`drain_in_mode`), 0.32 has one.
    """
    engine.output_queue = queue
    engine._event_driven_orch_default = event_driven
    engine._output_sink = writer
    engine._output_drain_executor = None


def drain_in_mode(front_end: Any, *, event_driven: bool) -> None:
    """Let an ``AsyncOmni``'s drain start in this mode where only the environment says it, as on 0.28."""
    asked = getattr(_orchestrator, "_event_driven_orch_enabled", None)
    if asked is None or "default" in inspect.signature(asked).parameters:  # one mode, or the engine's word
        return
    start = front_end._final_output_handler

    def _final_output_handler() -> None:
        with mock.patch.dict(os.environ, {_MODE_VARIABLE: "1" if event_driven else "0"}):
            start()

    front_end._final_output_handler = _final_output_handler
