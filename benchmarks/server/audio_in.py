"""Recorded audio that requests bring, which the API process decodes before anything else can be done with them."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping
from typing import Literal

from omni_fastpath.tools.ab import capture
from omni_fastpath.tools.ab.capture import Request

AudioIn = Literal["mono16k", "stereo48k", "mp3"]

FILES: Mapping[AudioIn, tuple[str, int, int, int]] = {
    "mono16k": ("wav", 5, 16_000, 1),
    "stereo48k": ("wav", 30, 48_000, 2),
    "mp3": ("mp3", 30, 48_000, 2),
}
"""Format, seconds, samples a second and channels. The first is what Qwen3-Omni hears, so that nothing is resampled."""


@functools.cache
def recorded(kind: AudioIn, what: str) -> str:
    """A file of hiss in base64, which follows from *what* alone: no two are alike, or the server would know the second.

    An mp3 takes a second to make, and is kept for the next start.
    """
    import numpy as np
    import soundfile  # type: ignore[import-untyped]

    form, seconds, rate, channels = FILES[kind]
    hiss = np.random.default_rng(list(what.encode())).normal(0.0, 0.05, (seconds * rate, channels))
    file = io.BytesIO()
    soundfile.write(file, hiss, rate, format=form)
    return base64.b64encode(file.getvalue()).decode()


def with_audio(request: Request, kind: AudioIn, what: str) -> Request:
    """The chat request, with a recording before its text."""
    return capture.with_audio(request, recorded(kind, what), FILES[kind][0])


def brings_audio(request: Request) -> bool:
    """Whether there is any in it."""
    return any(not isinstance(message["content"], str) for message in request.body.get("messages", ()))
