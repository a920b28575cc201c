"""torchaudio.transforms: any name resolves, every call refuses."""

from torchaudio._absent import absent_from

__getattr__ = absent_from("torchaudio.transforms")
