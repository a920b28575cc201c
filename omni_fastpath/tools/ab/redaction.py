"""What a report may show of the user's command lines and environment.

Names of options and variables, the values of variables of ours, and the values of a few options that hold no secret in
any program of vLLM's. Every other value is hidden: no list of patterns knows all ways to write a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from omni_fastpath import config
from omni_fastpath.patches import PATCHES

HIDDEN = "***"

_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*|-[A-Za-z]")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_PLAIN = re.compile(r"[\w.,/{}+-]+")
"""A value that is no address with a password, no assignment and no text."""
_WORDS = ("vllm", "vllm-omni", "bench", "serve", "{port}", "{result}", "{url}", "{host}")
_HARMLESS = re.compile(
    r"--(?:backend|dataset-name|deploy-config|dtype|endpoint|host|input-len|max-concurrency|max-model-len|model"
    r"|num-prompts|output-len|percentile-metrics|port|random-input-len|random-output-len|request-rate"
    r"|result-filename|seed|served-model-name|task|tensor-parallel-size)"
)
"""Options whose values are shown."""
_VARIABLES = frozenset(
    {"OMNI_SIMULATED_DEVICE", "OMNI_SIMULATED_DEVICE_CONFIG", "VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS"}
)
"""Variables besides our own whose values are shown: words, numbers and names of plugins."""


def command(words: Sequence[str]) -> list[str]:
    """A command, its placeholders not filled in, as a report may show it."""
    found = [PurePath(word).name if _PLAIN.fullmatch(word) else HIDDEN for word in words[:1]]
    before = ""
    for word in words[1:]:
        name, equals, value = word.partition("=")
        option = name if _OPTION.fullmatch(name) else ""
        if option:
            may_be_shown = _HARMLESS.fullmatch(option.replace("_", "-")) and _PLAIN.fullmatch(value)
            found.append(word if not equals or may_be_shown else f"{name}={HIDDEN}")
        elif equals and _VARIABLE.fullmatch(name):
            found.append(f"{name}={HIDDEN}")
        else:
            is_value = before in ("serve", "-m") or _HARMLESS.fullmatch(before.replace("_", "-"))
            found.append(word if word in _WORDS or (is_value and _PLAIN.fullmatch(word)) else HIDDEN)
        before = "" if equals else word
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables as a report may show them, by name."""
    known = {*config.variables(PATCHES), *_VARIABLES}
    return {name: environ[name] if name in known else HIDDEN for name in sorted(environ)}
