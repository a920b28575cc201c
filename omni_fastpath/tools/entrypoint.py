"""The name by which vLLM finds this package, and the allow-list that may exclude it."""

from __future__ import annotations

ENTRY_POINT = "omni_fastpath"
ALLOW_LIST = "VLLM_PLUGINS"
"""The variable with the names of the plugins that vLLM loads. If it is not set, vLLM loads all."""


def is_left_out(allowed: str | None) -> bool:
    """Whether this value of ``VLLM_PLUGINS`` excludes this plugin. None means unset.

    It is parsed as in ``vllm/envs.py``: split at commas, without stripping.
    """
    return allowed is not None and ENTRY_POINT not in allowed.split(",")
