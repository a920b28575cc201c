"""What light engines do that the simulated stages do not; all else is compared by ``test_light_server``."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from omni_simulated_device import config
from omni_simulated_device.light import behaviour


def test_silent_outputs_come_before_each_with_audio() -> None:
    """With ``silent`` 3 code2wav sends N N N A for each chunk, and ends with the last one."""
    settings = config.StageSettings(silent=3)
    spec = behaviour.StageSpec("code2wav", 4096, 2150, 16, 4, 25, 25, False, False, 0, settings)
    stage = behaviour.build(spec, print)
    chunks = deque(SimpleNamespace(frames=[[1] * 16], context=0, last=last) for last in (False, True))
    live: Any = SimpleNamespace(stream=SimpleNamespace(chunks=chunks), outputs=0, silent=0)
    answers = [stage.answer(live) for _ in range(8)]
    heard = [bool(each.arrays and each.arrays["model_outputs"][1].size) for each in answers]
    assert heard == [False, False, False, True] * 2
    assert [each.finish is not None for each in answers] == [False] * 7 + [True]
