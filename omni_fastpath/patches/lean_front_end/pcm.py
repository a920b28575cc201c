"""16-bit PCM, alone or as a WAV file, byte for byte as libsndfile writes 32-bit floats with clipping.

libsndfile scales a sample to 32 bits, rounds it to the nearest integer (ties to even), and keeps the upper 16 bits.
Samples outside the range are clipped (``f2les_clip_array`` of ``pcm.c``, ``wav_write_header`` of ``wav.c``).
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

MOST_SAMPLES = 1 << 24
"""Longer audio is left to libsndfile. This is two minutes at 128 kHz, far below the limits of the header's fields."""

_SCALE = np.float32(1 << 31)
_LEAST = np.float32(-1)
_MOST = np.float32(1 - 2**-24)
"""The greatest 32-bit float below 1. When scaled, its upper 16 bits are those of the end of the range."""

_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_PCM, _MONO, _BYTES = 1, 1, 2


def raw(samples: NDArray[np.float32], _rate: int) -> bytes:
    """Little-endian 16-bit samples.

    Args:
        samples: One dimension, finite.
        _rate: Unused.
    """
    scaled = np.clip(samples, _LEAST, _MOST)
    scaled *= _SCALE
    np.rint(scaled, out=scaled)
    return (scaled.astype(np.int32) >> 16).astype("<i2").tobytes()


def wav(samples: NDArray[np.float32], rate: int) -> bytes:
    """A WAV file of one channel.

    Args:
        samples: One dimension, finite, at most ``MOST_SAMPLES``.
        rate: Samples per second.
    """
    data = raw(samples, rate)
    form = (b"fmt ", 16, _PCM, _MONO, rate, rate * _BYTES, _BYTES, 8 * _BYTES)
    return _HEADER.pack(b"RIFF", _HEADER.size - 8 + len(data), b"WAVE", *form, b"data", len(data)) + data
