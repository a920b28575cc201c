"""What a report may show of the user's command lines and environment.

Names of options and variables, the values of variables of ours, and the values of a few options that hold no secret in
any program of vLLM's. Every other value is hidden: no list of patterns knows all ways to write a token.
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
"""A value that is no address with a password, no assignment and no text."""
_WORDS = ("vllm", "vllm-omni", "bench", "serve", "{port}", "{result}")
_SHOWN = re.compile(
    r"serve|-m|--(?:backend|dataset-name|deploy-config|dtype|endpoint|host|input-len|max-concurrency|max-model-len"
    r"|model|num-prompts|output-len|percentile-metrics|port|random-input-len|random-output-len|request-rate"
    r"|result-filename|seed|served-model-name|task|tensor-parallel-size)"
)
"""Words and options after which a value is shown."""
_VARIABLES = ("VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS")
"""Variables besides our own whose values are shown: a switch, and names of plugins."""


def command(words: Sequence[str]) -> list[str]:
    """A command, its placeholders not filled in, as a report may show it."""
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
    """Variables as a report may show them, by name."""
    known = {*config.variables(PATCHES), *_VARIABLES}
    return {name: environ[name] if name in known else HIDDEN for name in sorted(environ)}
