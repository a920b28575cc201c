"""The arms of the whole server, by what the command line calls them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omni_fastpath.declare import Patch, Process
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.ab.arm import Arm


@dataclass(frozen=True)
class ServerArm(Arm):
    """One arm.

    Attributes:
        arguments: Of ``vllm serve``.
    """

    arguments: tuple[str, ...] = ()


def _with(patch: Patch) -> Iterator[Patch]:
    """The patch and what it requires."""
    for name in patch.requires:
        yield from _with(next(each for each in PATCHES if each.name == name))
    yield patch


def _switched_on(*patches: Patch) -> dict[str, str]:
    return {each.env: "1" for patch in patches for each in _with(patch)}


_NO_LOG = ("--disable-log-stats",)
_TWO = ("--api-server-count", "2")
_HERE = [patch for patch in PATCHES if Process.SERVER in patch.processes]
_LEAN = [patch for patch in _HERE if patch.name in ("lean_processing", "lean_front_end")]

STOCK = ServerArm("stock")
EVENT = ServerArm("event", event_driven=True)
STOCK_NOLOG = ServerArm("stock-nolog", arguments=_NO_LOG)
EVENT_NOLOG = ServerArm("event-nolog", event_driven=True, arguments=_NO_LOG)
STOCK_2API = ServerArm("stock-2api", arguments=_TWO)
EVENT_2API = ServerArm("event-2api", event_driven=True, arguments=_TWO)
FASTPATH = ServerArm("fastpath", {"OMNI_FASTPATH": "1"})
LEAN = ServerArm("fastpath-lean", {"OMNI_FASTPATH": "1", **_switched_on(*_LEAN)})
ALL = ServerArm("fastpath-all", {"OMNI_FASTPATH": "1", **_switched_on(*_HERE)})
ONLY = tuple(ServerArm(f"only-{patch.name}", _switched_on(patch)) for patch in PATCHES)
"""Each patch alone, with what it requires; those of the stages have nothing to be in on light engines."""

ARMS: Mapping[str, ServerArm] = {
    arm.name: arm
    for arm in (
        *(STOCK, EVENT, STOCK_NOLOG, EVENT_NOLOG, STOCK_2API, EVENT_2API),
        *(FASTPATH, LEAN, ALL, *ONLY),
    )
}
USUAL = (STOCK, EVENT, FASTPATH)


def named(text: str) -> tuple[ServerArm, ...]:
    """The arms that a command line names, with commas, each once.

    Raises:
        argparse.ArgumentTypeError: One is not there.
    """
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, allowed: {', '.join(ARMS)}")
    return tuple(ARMS[name] for name in dict.fromkeys(text.split(",")))
