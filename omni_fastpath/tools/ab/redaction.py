"""Hide values in the user's command lines and environment before a report shows them.

Only the names of options and variables, the values of the package's own variables, and the values of a few options that
never contain a secret are shown. All other values are hidden, because no list of patterns covers all tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from omni_fastpath import config
from omni_fastpath.patches import PATCHES

HIDDEN = "***"

_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*|-[A-Za-z]")
_PLAIN = re.compile(r"[\w.,/{}+-]+")
"""A value that is not an address with a password, an assignment or text."""
_WORDS = ("vllm", "vllm-omni", "bench", "serve", "{port}", "{result}")
_SHOWN = re.compile(
    r"serve|-m|--(?:backend|dataset-name|deploy-config|dtype|endpoint|host|input-len|max-concurrency|max-model-len"
    r"|model|num-prompts|output-len|percentile-metrics|port|random-input-len|random-output-len|request-rate"
    r"|result-filename|seed|served-model-name|task|tensor-parallel-size)"
)
"""Words and options whose next word is shown."""
_VARIABLES = ("VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS")
"""Other variables whose values are shown: a switch, and names of plugins."""


def command(words: Sequence[str]) -> list[str]:
    """A command with placeholders, without hidden values."""
    found = [_value(PurePath(words[0]).name, may_be_shown=True)] if words else []
    for before, word in itertools.pairwise(words):
        name, equals, value = word.partition("=")
        if not _OPTION.fullmatch(name):
            may_be_shown = word in _WORDS or _SHOWN.fullmatch(before.replace("_", "-")) is not None
            found.append(_value(word, may_be_shown=may_be_shown))
        elif equals:
            may_be_shown = _SHOWN.fullmatch(name.replace("_", "-")) is not None
            found.append(f"{name}={_value(value, may_be_shown=may_be_shown)}")
        else:
            found.append(name)
    return found


def _value(value: str, *, may_be_shown: bool) -> str:
    return value if may_be_shown and _PLAIN.fullmatch(value) else HIDDEN


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by name, without hidden values."""
    known = {*config.variables(PATCHES), *_VARIABLES}
    return {name: environ[name] if name in known else HIDDEN for name in sorted(environ)}
