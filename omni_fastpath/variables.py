"""What decides, by the standard library alone, whether anything else of ours is imported: our variables' names.

``config`` is the page about all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMESPACE = "OMNI_FASTPATH"
MASTER = NAMESPACE
ON_UNSUPPORTED = f"{NAMESPACE}_ON_UNSUPPORTED"

HANDOFF = "_OMNI_FASTPATH_HANDOFF"
"""The variable that carries a parent's configuration to its stages (``startup``); outside the ``OMNI_FASTPATH``
namespace, in which it would be an unknown name."""

TRUE_WORDS = ("1", "true", "on", "yes")
FALSE_WORDS = ("0", "false", "off", "no")
BOOLEAN_WORDS = f"{' '.join(TRUE_WORDS)} or {' '.join(FALSE_WORDS)}"


def boolean(text: str) -> bool | None:
    """The boolean that a word stands for, whatever its case; None when it is none of the words."""
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    return None


def master_off(environ: Mapping[str, str]) -> bool:
    """Whether ``OMNI_FASTPATH`` is one of ``0 false off no``: then nothing else is looked at, not even validated."""
    return boolean(environ.get(MASTER, "")) is False


def anything_set(environ: Mapping[str, str]) -> bool:
    """Whether any variable has a name of our namespace, be it one that Kubernetes or Docker made."""
    return any(name.startswith(NAMESPACE) for name in environ)
