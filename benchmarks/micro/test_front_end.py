"""``lean_front_end``: what the front end's thread spends on a streamed chunk of audio."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from .conftest import Measured

CHUNKS = 32


@pytest.mark.parametrize("samples", [1_920, 9_600, 48_000])
def test_chunk(measured: Measured, samples: int) -> None:
    """The event of one chunk of audio with that number of samples, a WAV file in base64."""
    from tests.patches.chat_stream import output, sound

    measured(lambda: _streamed([output("audio", [sound(samples)]) for _ in range(CHUNKS)]), 20)


def _streamed(outputs: list[Any]) -> float:
    """Seconds per output."""
    from tests.patches.chat_stream import events, request

    async def run() -> float:
        asked = request()
        began = time.thread_time()
        await events(asked, outputs)
        return (time.thread_time() - began) / len(outputs)

    return asyncio.run(run())
