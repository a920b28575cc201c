"""Names of torchvision.transforms that transformers imports at module level."""

import enum


class InterpolationMode(enum.Enum):
    """Resampling modes, used as dictionary keys at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from torchvision.transforms import functional, v2  # noqa: E402  (v2 needs InterpolationMode)

__all__ = ["InterpolationMode", "functional", "v2"]
