"""What every start of the demo is asked."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omni_fastpath.tools.ab.capture import Request, chat_request

DEPLOYS = {1: "qwen3_omni.yaml", 2: "qwen3_omni_2x.yaml", 4: "qwen3_omni_4x.yaml"}

STEP_MS: Mapping[str, float] = {"thinker": 6.0, "talker": 5.0, "code2wav": 3.0}
"""Fixed part of a step of each stage, milliseconds.

Short ones, because that is where the patches have something to do: upstream's poll loop takes one raw output from each
replica a round and waits up to a millisecond at each that has none, so that a round over all replicas is longer than a
step of one of them, and its queue grows with every step. With the steps of a large model on one replica a stage nothing
queues, and nothing gets faster (``benchmarks.server``).
"""

SILENT = 3
"""Outputs of code2wav without audio before each one with it, as issue #4561 saw them."""


@dataclass(frozen=True)
class Load:
    """The load of one start; every start gets the same requests.

    Attributes:
        streams: Requests in flight in the closed loop.
        waves: Requests of the closed loop, in blocks of ``streams``; four, as in the issue.
        tokens: Least and most text tokens of an answer, exact for each request. Answers of one length would end
            together and be followed by requests that start together, which is a load of its own.
        rate: Requests a second of the open loop.
        paced: Requests of the open loop.
        alone: Requests that are sent one after another.
        replicas: Of each stage.
        step_ms: As ``STEP_MS``.
        seed: Of prompts and lengths.
    """

    streams: int = 32
    waves: int = 4
    tokens: tuple[int, int] = (50, 150)
    rate: float = 10.0
    paced: int = 50
    alone: int = 6
    replicas: int = 4
    step_ms: Mapping[str, float] = field(default_factory=lambda: dict(STEP_MS))
    seed: int = 0

    @property
    def deploy(self) -> str:
        """Name of the deploy YAML."""
        return DEPLOYS[self.replicas]

    @property
    def device(self) -> str:
        """The simulated device's configuration, for its environment variable."""
        stages: dict[str, dict[str, float]] = {stage: {"base_ms": step} for stage, step in self.step_ms.items()}
        stages["code2wav"]["silent"] = SILENT
        return json.dumps({"stages": stages})

    def requests(self, what: str, count: int) -> list[Request]:
        """So many, the same whenever they are asked for; those of another *what* are others."""
        return [self._request(f"{self.seed}:{what}:{index}") for index in range(count)]

    def _request(self, seed: str) -> Request:
        chance = random.Random(seed)
        prompt = "".join(chance.choices(string.ascii_lowercase + " ", k=60))
        return chat_request(prompt, max_tokens=chance.randint(*self.tokens), ignore_eos=True)

    def as_json(self) -> dict[str, Any]:
        """This as plain data."""
        return {**asdict(self), "deploy": self.deploy, "silent": SILENT}


QUICK = Load(streams=4, waves=2, tokens=(10, 30), paced=6, alone=2)
"""A small load for trying the demo itself; its figures mean nothing."""
