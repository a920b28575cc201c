"""torchaudio.transforms: ``Resample``, which vLLM needs for recorded audio; any other name resolves, and refuses."""

import math

import torch

from torchaudio._absent import absent_from

__getattr__ = absent_from("torchaudio.transforms")

ZEROS, ROLLOFF = 6, 0.99
"""Of the filter, as the real one has them unless it is told otherwise: it then costs as much."""


class Resample:
    """Interpolation with a sinc under a Hann window, by one strided convolution, between two whole sample rates."""

    def __init__(self, orig_freq: int, new_freq: int) -> None:
        common = math.gcd(orig_freq, new_freq)
        self._old, self._new = orig_freq // common, new_freq // common
        cutoff = ROLLOFF * min(self._old, self._new)
        self._reach = math.ceil(ZEROS * self._old / cutoff)
        taps = torch.arange(-self._reach, self._reach + self._old) / self._old
        places = (taps - torch.arange(self._new)[:, None] / self._new).mul(cutoff).clamp(-ZEROS, ZEROS)
        window = torch.cos(places * math.pi / (2 * ZEROS)) ** 2
        self._filter = (torch.sinc(places) * window * cutoff / self._old)[:, None]

    def __call__(self, waveform: torch.Tensor) -> torch.Tensor:
        """The waveform, [..., samples] float32, at the new rate."""
        flat = waveform.reshape(-1, 1, waveform.shape[-1])
        padded = torch.nn.functional.pad(flat, (self._reach, self._reach + self._old))
        found = torch.nn.functional.conv1d(padded, self._filter, stride=self._old).transpose(1, 2)
        samples = math.ceil(waveform.shape[-1] * self._new / self._old)
        return found.reshape(*waveform.shape[:-1], -1)[..., :samples]
