"""Servers of this user that have no state file: run as stock, or out of our sight.

A server that nobody asked anything of is invisible by design, and one whose ``VLLM_PLUGINS`` leaves us out cannot say
anything. Both look alike from a shell, so ``status`` names them and what their own environment says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Any

import psutil


def without_state(known: Collection[int], entry_point: str) -> list[dict[str, Any]]:
    """The processes of this user that look like ``vllm serve ... --omni`` and are not among the known pids.

    Each as ``pid``, ``command``, ``vllm_plugins`` (its allow-list, None when not set) and ``excluded``: whether that
    list leaves ``entry_point`` out.
    """
    found = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        command = process.info["cmdline"] or []
        mine = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        if not mine or process.pid in known or not {"serve", "--omni"} <= set(command):
            continue
        with contextlib.suppress(psutil.Error):
            allowed = process.environ().get("VLLM_PLUGINS")
            found.append(
                {
                    "pid": process.pid,
                    "command": " ".join(command),
                    "vllm_plugins": allowed,
                    "excluded": allowed is not None and entry_point not in allowed.split(","),
                }
            )
    return sorted(found, key=lambda server: int(server["pid"]))
