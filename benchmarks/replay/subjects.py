"""The replay's arms."""

from __future__ import annotations

import argparse

from benchmarks.rigs.arm import Arm
from omni_fastpath.patches import PATCHES

_ON = {"OMNI_FASTPATH": "1"}
_ORDER = "OMNI_FASTPATH_BUDGETED_DRAIN__ORDER"

BASELINE = "stock-event"
"""Upstream's event-driven loop: what every ratio is against."""

ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock-poll"),
        Arm("stock-event", event_driven=True),
        Arm("stock-event-2", event_driven=True),
        Arm("fastpath", _ON),
        Arm("fastpath-event", _ON, event_driven=True),
        *(Arm(order, {**_ON, _ORDER: order}) for order in ("stage_order", "downstream_first", "visible_first")),
        Arm("fastpath-2", _ON),
    )
}
USUAL = ("stock-poll", "stock-event", "stock-event-2", "fastpath", "stage_order", "downstream_first", "fastpath-2")
"""The arms that run unless told otherwise; ``fastpath`` has the default order, ``visible_first``."""


def named(name: str) -> Arm:
    """An arm by its name; ``fastpath+PATCH+PATCH`` is the default set and more patches.

    Raises:
        argparse.ArgumentTypeError: There is none of that name.
    """
    if name in ARMS:
        return ARMS[name]
    base, *more = name.split("+")
    if base == "fastpath" and set(more) <= {patch.name for patch in PATCHES}:
        return Arm(name, {**_ON, **{f"OMNI_FASTPATH_{patch.upper()}": "1" for patch in more}})
    raise argparse.ArgumentTypeError(f"{name}: none of {', '.join(ARMS)}, nor fastpath+PATCH")
