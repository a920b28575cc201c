"""An arm: what is switched on in a server or in a process, and whose turn it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from omni_fastpath import config
from omni_fastpath.patches import PATCHES

FOREIGN = ("OMNI_FASTPATH", "_OMNI_FASTPATH", "VLLM_OMNI_EVENT_DRIVEN_ORCH", "VLLM_PLUGINS")
"""How the variables begin that only an arm itself may set: what this shell says must not get through."""

T = TypeVar("T")


class WrongArmError(RuntimeError):
    """A process was not what its arm says; its figures must not be shown."""


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: As tables show it.
        environment: Our variables in this arm; empty is stock.
        event_driven: The orchestrator and the front end run in upstream's event-driven mode; None: as the release does.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    event_driven: bool | None = False

    @property
    def on(self) -> bool:
        """Whether anything of ours is on in this arm."""
        return bool(self.enabled)

    @property
    def enabled(self) -> frozenset[str]:
        """The patches that its variables switch on."""
        return frozenset(config.resolve(None, self.environment, PATCHES).enabled)


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment without what only an arm may say."""
    return {key: value for key, value in environ.items() if not key.startswith(FOREIGN)}


def turns(arms: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Round and arm in the order of running: A B, B A, A B, ... for two arms; a round has each arm once.

    So what drifts on the machine hits all alike.
    """
    for number in range(rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield number, arm
