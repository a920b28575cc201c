"""Import-only stand-in for torchaudio: the modules that a server imports, none of the behaviour."""

from torchaudio import functional, transforms

__version__ = "2.11.0+stub"
__all__ = ["functional", "transforms"]
