"""What every start of the demo is asked to do."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.serving.capture import Request, chat_request

STEP_MS: Mapping[str, float] = {"thinker": 2.0, "talker": 5.0, "code2wav": 3.0}
"""Fixed part of a step of each stage, milliseconds.

Issue #4561 needs stages that produce raw outputs faster than the orchestrator takes them. The poll loop of 0.30 takes
one from each of six replicas a round and waits up to a millisecond on each that has none: 150 to 200 rounds a second.
Thinker steps of 2 ms, which take about 3.5 ms with a process's own work, are above that rate, so its queue grows: a
small or speculatively decoding text model does the same. The talker and code2wav are slower on purpose: at 2 ms each,
the six stage processes alone fill two cores, and what is then measured is the machine.
"""


@dataclass(frozen=True)
class Load:
    """The load of one start; every start gets the same.

    Attributes:
        concurrency: Requests in flight. Eight on two cores keep four requests in a batch of each replica, and leave
            the stock arm a third of the machine idle: what it lacks is not the processor.
        waves: Requests, in blocks of ``concurrency``; four, as in the issue.
        input_tokens: Length of a prompt; the simulated tokenizer makes one token of a byte.
        output_tokens: Text tokens of an answer, exactly (``ignore_eos``). 150 tokens are a spoken answer of some ten
            sentences' words; long enough for a queue that grows with every token to be seen.
        step_ms: As ``STEP_MS``.
        seed: Of the prompts.
    """

    concurrency: int = 8
    waves: int = 4
    input_tokens: int = 60
    output_tokens: int = 150
    step_ms: Mapping[str, float] = field(default_factory=lambda: dict(STEP_MS))
    seed: int = 0

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


QUICK = Load(concurrency=4, input_tokens=40, output_tokens=30)
"""A small load for trying the demo itself; its figures mean nothing."""


def order(starts: int) -> list[str]:
    """The arm of each start: stock first, then each pair the other way round, so that drift hits both arms alike."""
    pairs = [("stock", "fastpath"), ("fastpath", "stock")]
    return [arm for pair in range(starts) for arm in pairs[pair % 2]]
