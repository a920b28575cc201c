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


_HERE = [patch for patch in PATCHES if Process.SERVER in patch.processes]
_LEAN = [patch for patch in _HERE if patch.name in ("lean_processing", "lean_front_end")]
_VARIANTS = {"": (), "-nolog": ("--disable-log-stats",), "-2api": ("--api-server-count", "2")}

ARMS: Mapping[str, ServerArm] = {
    arm.name: arm
    for arm in (
        *(
            ServerArm(name + suffix, event_driven=name == "event", arguments=arguments)
            for suffix, arguments in _VARIANTS.items()
            for name in ("stock", "event")
        ),
        ServerArm("fastpath", {"OMNI_FASTPATH": "1"}),
        ServerArm("fastpath-lean", {"OMNI_FASTPATH": "1", **_switched_on(*_LEAN)}),
        ServerArm("fastpath-all", {"OMNI_FASTPATH": "1", **_switched_on(*_HERE)}),
        *(ServerArm(f"only-{patch.name}", _switched_on(patch)) for patch in PATCHES),
    )
}
"""The last ones are each patch alone, with what it requires; those of the stages have nothing to be in on light
engines."""

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
