"""How vLLM finds us: the entry point in its groups of plugins, unless an allow-list leaves it out."""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINT = "omni_fastpath"
GROUPS = ("vllm.general_plugins", "vllm_omni.general_plugins")
ALLOW_LIST = "VLLM_PLUGINS"
"""The variable with the names of the plugins that vLLM loads; where it is not set, all are."""


def visible_groups() -> list[str]:
    """The groups in which the entry point is visible in this environment."""
    return [group for group in GROUPS if tuple(entry_points(group=group, name=ENTRY_POINT))]


def is_left_out(allowed: str | None) -> bool:
    """Whether vLLM does not load us under this value of ``VLLM_PLUGINS``; None where it is not set.

    As ``vllm/envs.py`` reads it: split at commas, names compared as they stand.
    """
    return allowed is not None and ENTRY_POINT not in allowed.split(",")
