"""The arms of the whole server, by what the command line calls them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from benchmarks.rigs import about
from benchmarks.rigs.arm import Arm
from omni_fastpath.patches import PATCHES
from omni_fastpath.patches.connections import PATCH as CONNECTIONS
from omni_simulated_device import WITHOUT_VARIABLE
from omni_simulated_device.without import PARTS

_ON = {"OMNI_FASTPATH": "1"}
_2API = ("--api-server-count", "2")

_PATCHES = {
    **{
        f"without-{patch.name}": {
            **_ON,
            **{each.env: "0" for each in PATCHES if each is patch or patch.name in each.requires},
        }
        for patch in PATCHES
        if patch.default_on and patch is not CONNECTIONS  # which serves others only
    },
    **{f"with-{patch.name}": {**_ON, patch.env: "1"} for patch in PATCHES if not patch.default_on},
    **{f"only-{patch.name}": {patch.env: "1"} for patch in PATCHES},
}
_PARTS = {f"without-{part}": {**_ON, WITHOUT_VARIABLE: part} for part in PARTS}

ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for suffix, arguments in {"": (), "-2api": _2API}.items()
    for arm in (
        Arm(f"poll{suffix}", {}, False, arguments),
        Arm(f"event{suffix}", {}, True, arguments),
        *(
            Arm(name + suffix, environment, None, arguments)
            for name, environment in ({"default": _ON} | _PATCHES | _PARTS).items()
        ),
    )
}
"""Stock has upstream's poll loop or its event-driven one. What has any patch has the loop that the release would take,
where no patch replaces both."""

STOCK = ("poll", "event")
USUAL = tuple(ARMS[name] for name in (*STOCK, "default"))


def parts() -> tuple[Arm, ...]:
    """The default set with one thing other than usual in each, and the first two patches alone."""
    names = [name for name in (*_PATCHES, *_PARTS) if not name.startswith(("with-", "only-"))]
    more = ("event+without-budgeted_drain", "only-budgeted_drain")
    return tuple(map(_combined, (*names, *more)))


def _combined(text: str) -> Arm:
    names, _, checkout = text.partition("@")
    arms = [ARMS[name] for name in names.split("+")]
    environment = {name: value for arm in arms for name, value in arm.environment.items()}
    if len(taken_out := [arm.environment[WITHOUT_VARIABLE] for arm in arms if WITHOUT_VARIABLE in arm.environment]) > 1:
        environment[WITHOUT_VARIABLE] = ",".join(taken_out)
    if "only-" in names:
        environment.pop("OMNI_FASTPATH", None)
    if checkout:
        environment["PYTHONPATH"] = str(Path(checkout).resolve())
        names += f"@{about.commit(Path(checkout).resolve())}"
    event_driven = next((arm.event_driven for arm in arms if arm.event_driven is not None), None)
    return Arm(names, environment, event_driven, max((arm.arguments for arm in arms), key=len))


def named(text: str) -> tuple[Arm, ...]:
    """The arms that a command line names, with commas, each once; ``a+b`` is what both are, ``a@FOLDER`` by older code.

    Raises:
        argparse.ArgumentTypeError: One is not there.
    """
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if not set(name.partition("@")[0].split("+")) <= ARMS.keys()]
    if unknown:
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, allowed: {', '.join(ARMS)}")
    return tuple(map(_combined, names))
