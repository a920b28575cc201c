"""The replay's arms, and the check that an arm is what it says."""

from __future__ import annotations

import argparse

from benchmarks.rigs import process_arms
from omni_fastpath.declare import Process
from omni_fastpath.patches import PATCHES
from omni_fastpath.tools.ab.arm import Arm

_ON = {"OMNI_FASTPATH": "1"}
_VALUE = "OMNI_FASTPATH_BUDGETED_DRAIN__"
_ORDER = f"{_VALUE}ORDER"

ORDERS = ("stage_order", "downstream_first", "visible_first")

BASELINE = "stock-event"
"""Upstream's event-driven loop: what every ratio is against."""

AA_PAIRS = {"stock-event": "stock-event-2", "fastpath": "fastpath-2"}
"""An arm and its repetition: the interval of their ratio is what a difference must leave to mean something."""

ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock-poll"),
        Arm("stock-event", event_driven=True),
        Arm("stock-event-2", event_driven=True),
        Arm("fastpath", _ON),
        *(Arm(order, {**_ON, _ORDER: order}) for order in ORDERS),
        Arm("fastpath-event", _ON, event_driven=True),
        *(Arm(f"{order}-event", {**_ON, _ORDER: order}, event_driven=True) for order in ORDERS),
        Arm("fastpath-2", _ON),
    )
}


def named(name: str) -> Arm:
    """An arm by its name; an order with other values is ``ORDER,KEY=VALUE``, more patches ``fastpath+PATCH+PATCH``.

    Raises:
        argparse.ArgumentTypeError: There is none of that name.
    """
    if name in ARMS:
        return ARMS[name]
    base, *more = name.split("+")
    if base == "fastpath" and more and set(more) <= {patch.name for patch in PATCHES}:
        return Arm(name, {**_ON, **{f"OMNI_FASTPATH_{patch.upper()}": "1" for patch in more}})
    order, *values = name.split(",")
    if order not in ORDERS or not values or not all("=" in each for each in values):
        raise argparse.ArgumentTypeError(f"{name}: none of {', '.join(ARMS)}, nor ORDER,KEY=VALUE, nor fastpath+PATCH")
    pairs = [each.split("=") for each in values]
    options = {f"{_VALUE}{key.upper()}": value for key, value in pairs}
    return Arm(name, {**_ON, _ORDER: order, **options})


def defaults() -> list[str]:
    """The arms that run unless told otherwise; ``fastpath`` has the default order."""
    from omni_fastpath.patches.budgeted_drain import DrainOptions

    others = [order for order in ORDERS if order != DrainOptions().order]
    return ["stock-poll", "stock-event", "stock-event-2", "fastpath", *others, "fastpath-2"]


def prepare(arm: Arm) -> None:
    """Switch on what the arm says in this process."""
    process_arms.switch_on(arm, Process.SERVER)


def check(arm: Arm) -> dict[str, dict[str, int]]:
    """Assert, at the end of a run, that the arm was on all the time; what its patches counted."""
    counters = process_arms.check(arm, Process.SERVER)
    drain = counters.get("budgeted_drain")
    assert drain is None or drain["items"] > 0, drain
    return counters
