"""What every start is asked to do."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import omni_simulated_device
from omni_fastpath.tools.ab.capture import Request, chat_request

REPLICAS, STAGES = 2, 3
BASE = Path(omni_simulated_device.__file__).parent / "deploy" / "qwen3_omni_2x.yaml"
"""The deploy YAML of both arms."""

STEP_MS: Mapping[str, float] = {"thinker": 2.0, "talker": 2.0, "code2wav": 1.0}
"""Fixed part of a step of each stage, milliseconds.

Issue #4561 needs stages that make raw outputs faster than the orchestrator takes them. The poll loop of 0.30 takes one
from each of the six replicas a round, and waits up to a millisecond on each that has none. A step of 2 ms, some 3.5
with its process's own work, is shorter than such a round, so the thinker's queue grows with every token: text waits
there, and whatever else a request needs from the orchestrator.

Longer steps were tried on two cores, and are no case of the issue:

* 2, 5 and 3 ms: the talker and code2wav decide how long a request takes. Two runs gave a throughput ratio
  of 1.43 and 0.92, within what one arm varies from start to start on a shared machine.
* 3, 12 and 8 ms: as before, and for a wave or more at a time, in either arm, half of the requests take 3.7 s instead of
  2.4 s (a replica's requests then seem to take turns in two batches under async scheduling).

In all of them time to first text falls, and TTFP of the later waves is not better, often worse.

What short steps cost: the stock arm leaves a quarter of two cores idle, but the fastpath arm, which serves more
requests in the same time, fills them, as the table's row of cores says. Its TTFP in the later waves is higher, on four
cores too: in a closed loop it has more requests in its stages, and they start together. So both arms also get the same
arrivals, ``rate`` a second, in an open loop.

The queue that builds is the thinker's, of outputs that are all text for the user. code2wav, with chunks of 25 frames,
makes far fewer outputs than the orchestrator takes, and the drain's counters (as many passes as items) show no
invisible ones queued before a visible one. So this load has the issue's cause but not its queue N N N A, which
``benchmarks.dispatch`` has, and the queue alone promises no large difference of TTFP.
"""


@dataclass(frozen=True)
class Load:
    """The load of one start; every start gets the same.

    Attributes:
        concurrency: Requests in flight: four a replica.
        waves: Requests, in blocks of ``concurrency``; four, as in the issue.
        input_tokens: Length of a prompt; the simulated tokenizer makes one token of a byte.
        output_tokens: Text tokens of an answer, exactly (``ignore_eos``). 120 go with some 10 s of audio; long enough
            for a queue that grows with every token to be seen.
        step_ms: As ``STEP_MS``.
        rate: Requests a second of the open loop; less than either arm serves.
        paced: Requests of the open loop.
        seed: Of the prompts.
    """

    concurrency: int = 8
    waves: int = 4
    input_tokens: int = 60
    output_tokens: int = 120
    step_ms: Mapping[str, float] = field(default_factory=lambda: dict(STEP_MS))
    seed: int = 0
    rate: float = 2.0
    paced: int = 24

    @property
    def requests(self) -> int:
        """How many requests a measurement has."""
        return self.concurrency * self.waves

    @property
    def device(self) -> str:
        """The simulated device's configuration, for its environment variable."""
        return json.dumps({"stages": {stage: {"base_ms": step} for stage, step in self.step_ms.items()}})

    def capture_requests(self) -> list[Request]:
        """The capture client's requests: random prompts of one length, the same in every start."""
        return [self._request(index) for index in range(self.requests)]

    def paced_requests(self) -> list[Request]:
        """The open loop's requests, of prompts of their own."""
        return [self._request(self.requests + index) for index in range(self.paced)]

    def warm_up_requests(self) -> list[Request]:
        """A few short ones of other prompts, so that no measured request is the first of its kind."""
        short = replace(self, output_tokens=10)
        return [short._request(-1 - index) for index in range(min(4, self.concurrency))]

    def _request(self, index: int) -> Request:
        letters = random.Random(f"{self.seed}:{index}")
        prompt = "".join(letters.choices(string.ascii_lowercase + " ", k=self.input_tokens))
        return chat_request(prompt, max_tokens=self.output_tokens, ignore_eos=True)

    def as_json(self) -> dict[str, Any]:
        """This as plain data."""
        return {**asdict(self), "requests": self.requests}


QUICK = Load(concurrency=4, input_tokens=40, output_tokens=30, paced=4)
"""A small load for trying the program itself; its figures mean nothing."""
