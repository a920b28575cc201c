"""The entry point by which vLLM finds this package, and the allow-list that may exclude it."""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINT = "omni_fastpath"
GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")
ALLOW_LIST = "VLLM_PLUGINS"
"""The variable with the names of the plugins that vLLM loads. If it is not set, vLLM loads all."""


def visible_groups() -> list[str]:
    """The groups that have the entry point in this environment."""
    return [group for group in GROUPS if tuple(entry_points(group=group, name=ENTRY_POINT))]


def is_left_out(allowed: str | None) -> bool:
    """Whether this value of ``VLLM_PLUGINS`` excludes this plugin. None means unset.

    It is parsed as in ``vllm/envs.py``: split at commas, without stripping.
    """
    return allowed is not None and ENTRY_POINT not in allowed.split(",")
