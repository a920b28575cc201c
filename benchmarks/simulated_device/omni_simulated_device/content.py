"""Tokens, codec frames and samples as functions of a request's content.

Everything here is pure: the same content and seed give the same bytes in any process, batch and order. A request's
content is reduced once, where its prompt is known, to a *key* of eight bytes. Later stages never see the prompt, so the
key travels to them inside the hidden-state rows (`encode_tags`, `decode_tag`); an audio frame's samples follow from its
sixteen codes alone, as a codec's would, so that a lost, repeated or swapped frame is audible in the comparison.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from omni_simulated_device.config import StageSettings

KEY_BYTES = 8
SAMPLES_A_FRAME = 1920
"""24 kHz / 12.5 Hz."""
CODEBOOK_SIZE = 2048
POSITION_BYTES = 3  # 16 million positions, more than any context
ROW_BYTES = KEY_BYTES + 2 * POSITION_BYTES
_LETTERS = tuple(range(64, 90))  # 'a' to 'z' in the byte-level vocabulary that `models` writes
_SPACE = 220
_NOISE_SAMPLES = 1 << 16


SPEECH_CONTENT = ("text", "task_type", "language", "speaker", "instruct", "ref_text")
"""Of a speech request, what a listener would hear; the rest (limits, chunk sizes) must not change the voice."""


def sampling_seed(seed: int | None, temperature: float) -> int | None:
    """A request's own seed where it would matter: greedy decoding gives the same answer whatever the seed."""
    return None if seed is None or not temperature else int(seed)


def content_key(seed: int, *parts: object) -> bytes:
    """Reduce *parts* (JSON-like values) and the configured *seed* to a key of `KEY_BYTES` bytes."""
    text = json.dumps([seed, *parts], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def _digest(key: bytes, purpose: bytes, index: int, size: int) -> bytes:
    return hashlib.blake2b(purpose + index.to_bytes(8, "little"), key=key, digest_size=size).digest()


def choose(key: bytes, purpose: str, low: int, high: int) -> int:
    """A number from *low* to *high*, both included, fixed by *key* and *purpose*."""
    return low + int.from_bytes(_digest(key, purpose.encode(), 0, 8), "little") % (high - low + 1)


def text_length(
    key: bytes, settings: StageSettings, least: int, limit: int, ignores_eos: bool
) -> tuple[int | None, int]:
    """After how many tokens a text ends by itself (None: never), and how many it will have, *limit* at most."""
    if ignores_eos:
        return None, limit
    length = max(choose(key, "text length", settings.min_tokens, settings.max_tokens), least + 1)
    return length, min(length, limit)


def speech_frames(key: bytes, settings: StageSettings, text_tokens: int, min_tokens: int) -> int:
    """Codec frames of a request with so many text tokens; 0: the talker is the first stage and sees none."""
    if settings.frames_per_token and text_tokens:
        frames = round(settings.frames_per_token * text_tokens)
    else:
        frames = choose(key, "frames", settings.min_frames, settings.max_frames)
    # Qwen3-Omni's talker reads one text token a step and does not end before the text does.
    return max(frames, text_tokens, min_tokens)


def text_token(key: bytes, index: int) -> int:
    """Token id of the *index*-th generated text token: letters, with a space now and then."""
    value = int.from_bytes(_digest(key, b"text", index, 2), "little")
    return _SPACE if value % 6 == 5 else _LETTERS[(value >> 3) % len(_LETTERS)]


def codec_frame(key: bytes, index: int, codebooks: int) -> list[int]:
    """Codes of the *index*-th frame, one per codebook, each from 1 to `CODEBOOK_SIZE` - 1.

    Zero is avoided because upstream takes an all-zero frame for padding.
    """
    raw: list[int] = np.frombuffer(_digest(key, b"frame", index, 2 * codebooks), dtype="<u2").tolist()
    return [1 + code % (CODEBOOK_SIZE - 1) for code in raw]


@cache
def _noise() -> npt.NDArray[np.float32]:
    # PCG64's stream is fixed by NumPy's compatibility policy, so that every process holds the same table.
    generator = np.random.Generator(np.random.PCG64(20240))
    return (generator.random(_NOISE_SAMPLES, dtype=np.float32) - np.float32(0.5)) * np.float32(0.4)


def frame_samples(codes: Sequence[int], samples: int = SAMPLES_A_FRAME) -> npt.NDArray[np.float32]:
    """Audio of one frame: values between -0.2 and 0.2 that follow from its *codes*."""
    digest = hashlib.blake2b(np.asarray(codes, dtype="<u2").tobytes(), digest_size=8).digest()
    start = int.from_bytes(digest[:4], "little") % _NOISE_SAMPLES
    table = _noise()
    if start + samples <= _NOISE_SAMPLES:
        wave = table[start : start + samples].copy()
    else:
        wave = np.take(table, np.arange(start, start + samples), mode="wrap")
    # The table has fewer places than there are frames: the first sample tells two frames at one place apart.
    wave[0] = np.float32(int.from_bytes(digest[4:6], "little") / 65536 * 0.4 - 0.2)
    return wave


@dataclasses.dataclass(frozen=True)
class RowTag:
    """What one hidden-state row says: whose it is, which position it holds, and how long the text will be."""

    key: bytes
    position: int
    text_tokens: int


def encode_tags(key: bytes, positions: Iterable[int], text_tokens: int) -> npt.NDArray[np.uint8]:
    """Tags for hidden-state rows at *positions*, one row of `ROW_BYTES` bytes each, saying `RowTag`'s three things.

    They become the rows' leading elements: bfloat16 holds every integer up to 256 exactly.
    """
    tags = [
        key + position.to_bytes(POSITION_BYTES, "little") + text_tokens.to_bytes(POSITION_BYTES, "little")
        for position in positions
    ]
    return np.frombuffer(b"".join(tags), dtype=np.uint8).reshape(len(tags), ROW_BYTES)


def decode_tag(row: Sequence[float]) -> RowTag:
    """Read a tag back from a row; its first `ROW_BYTES` elements are enough."""
    raw = bytes(int(value) for value in row[:ROW_BYTES])
    return RowTag(
        key=raw[:KEY_BYTES],
        position=int.from_bytes(raw[KEY_BYTES : KEY_BYTES + POSITION_BYTES], "little"),
        text_tokens=int.from_bytes(raw[KEY_BYTES + POSITION_BYTES :], "little"),
    )
