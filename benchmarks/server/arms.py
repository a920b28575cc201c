"""The arms of the whole server, by what the command line calls them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.rigs.arm import Arm
from omni_fastpath.patches import PATCHES


@dataclass(frozen=True)
class ServerArm(Arm):
    """One arm.

    Attributes:
        arguments: Of ``vllm serve``.
    """

    arguments: tuple[str, ...] = ()


_VARIANTS = {"": (), "-nolog": ("--disable-log-stats",), "-2api": ("--api-server-count", "2")}
_ON = {"OMNI_FASTPATH": "1"}

ARMS: Mapping[str, ServerArm] = {
    arm.name: arm
    for arm in (
        *(
            ServerArm(name + suffix, environment, name == "event", arguments)
            for suffix, arguments in _VARIANTS.items()
            for name, environment in (("stock", {}), ("event", {}), ("fastpath", _ON))
        ),
        *(ServerArm(f"without-{patch.name}", {**_ON, patch.env: "0"}) for patch in PATCHES if patch.default_on),
        *(ServerArm(f"with-{patch.name}", {**_ON, patch.env: "1"}) for patch in PATCHES if not patch.default_on),
        *(ServerArm(f"only-{patch.name}", {patch.env: "1"}) for patch in PATCHES),
    )
}
"""The last ones are each patch alone, with what it requires. Light engines have no use for most patches of stages."""

USUAL = (ARMS["stock"], ARMS["event"], ARMS["fastpath"])


def named(text: str) -> tuple[ServerArm, ...]:
    """The arms that a command line names, with commas, each once.

    Raises:
        argparse.ArgumentTypeError: One is not there.
    """
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, allowed: {', '.join(ARMS)}")
    return tuple(ARMS[name] for name in dict.fromkeys(text.split(",")))
