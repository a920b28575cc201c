"""Names of torchvision.io that transformers imports at module level."""

import enum

from torchvision._absent import absent_from


class ImageReadMode(enum.Enum):
    """Colour modes, present because they appear as default arguments."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


__getattr__ = absent_from("torchvision.io")
