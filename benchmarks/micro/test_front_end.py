"""``lean_front_end``: what the front end's thread spends on a chunk of audio."""

from __future__ import annotations

import time

import pytest

from .conftest import Measured

CHUNKS = 32


@pytest.mark.parametrize("samples", [1_920, 9_600, 48_000])
def test_chunk(measured: Measured, samples: int) -> None:
    """One chunk of audio with that number of samples as a WAV file in base64, as upstream's servings make it."""
    measured(lambda: _made(samples), 20)


def _made(samples: int) -> float:
    """Seconds per chunk."""
    import numpy as np
    from vllm_omni.entrypoints.openai.audio_utils_mixin import AudioMixin
    from vllm_omni.entrypoints.openai.protocol.audio import CreateAudio

    chunk = CreateAudio(audio_tensor=np.linspace(-1, 1, samples, dtype=np.float32), sample_rate=24_000)
    mixin = AudioMixin()
    began = time.thread_time()
    for _ in range(CHUNKS):
        mixin.create_audio(chunk)
    return (time.thread_time() - began) / CHUNKS
