"""What every start is asked, the same in every arm."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from benchmarks.ab.capture import Capture, Request, chat_request, speech_request
from benchmarks.limit import limit_of
from benchmarks.rigs.captures import run_closed_loop, run_open_loop
from benchmarks.rigs.whole_server import FEWEST

Kind = Literal["audio", "text"]
Loop = Literal["closed", "open"]

LEVELS = (8, 32, 64, 128)
OPEN_REQUESTS = 64
TOKENS: Mapping[Kind, int] = {"audio": 100, "text": 200}
"""Of an answer in the middle: text tokens, of speech codec frames."""
FRAMES_PER_TOKEN = 5.0
"""Codec frames of a chat answer for each text token.

Issue #4561 shows 2,585 text tokens and 1,036 s of audio: 0.40 s for each token. A frame is 0.08 s.
"""
_TEMPLATE_TOKENS = 8
"""What the chat template adds to a message. A letter of a message is a token."""


class Layout(NamedTuple):
    """Stages and GPUs: model, deploy YAML, and a preset of the simulated device."""

    model: str
    deploy: str
    preset: str


LAYOUTS: Mapping[str, Layout] = {
    "pair": Layout("qwen3_omni", "qwen3_omni.yaml", "h100"),
    "1:2:2": Layout("qwen3_omni", "qwen3_omni_1-2-2.yaml", "h100"),
    "node": Layout("qwen3_omni", "qwen3_omni_4x.yaml", "h100"),
    "own": Layout("qwen3_omni", "qwen3_omni_4x.yaml", "h100-own"),
    "tts": Layout("qwen3_tts", "qwen3_tts_v2.yaml", "tts-v2"),
    "tts-4x": Layout("qwen3_tts", "qwen3_tts_v2_4x.yaml", "tts-v2"),
    "tts-8x": Layout("qwen3_tts", "qwen3_tts_v2_8x.yaml", "tts-v2"),
}
"""Upstream's default YAML on its two GPUs, with two talkers and two code2wavs, four times on eight GPUs, and four of
each stage on a GPU of its own; Qwen3-TTS on one, four and eight GPUs."""


@dataclass(frozen=True)
class Load:
    """What every start is asked.

    Attributes:
        levels: One after the other: streams in flight of a closed loop, requests a second of an open one.
        layout: Of `LAYOUTS`.
        kind: What a chat answer is of.
        prompt: Tokens of a chat prompt; None: a short question.
        tokens: Text tokens of an answer; of speech its codec frames; None: of `TOKENS`.
        vary: Lengths lie evenly in ``tokens`` times (1 - vary) to (1 + vary), the same for every arm and start.
            With 0 all have one length, end together in a closed loop, and so their successors begin together.
        loop: Closed: the next request starts when one has ended; open: a Poisson process, the same for every start.
        waves: Requests at a level of a closed loop, in blocks of its streams.
        requests: Requests at each level; None: by waves, and ``OPEN_REQUESTS`` of an open loop.
        pace: Steps of the device take so many times as long, and arrivals of an open loop lie as much further apart.
            So a server on slower cores has the share of a step that it has on faster ones; in the device's seconds
            (`in_device_time`) what waits by a timer of its own seems shorter.

    Raises:
        ValueError: *vary* is no share, *pace* is below 1 or endless, or Qwen3-TTS is asked for text or given a prompt
            of so many tokens.
    """

    levels: Sequence[float] = LEVELS
    layout: str = "node"
    kind: Kind = "audio"
    prompt: int | None = None
    tokens: int | None = None
    vary: float = 0.5
    loop: Loop = "closed"
    waves: int = 2
    requests: int | None = None
    pace: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.vary < 1:
            raise ValueError(f"vary: found {self.vary:g}, allowed: 0 to less than 1")
        if not 1 <= self.pace < math.inf:
            raise ValueError(f"pace: found {self.pace:g}, allowed: 1 and more")
        if self.is_speech and (self.kind == "text" or self.prompt is not None):
            raise ValueError(f"layout: found {self.layout} with text or a prompt, which are of chat")

    @property
    def model(self) -> str:
        """Which of `omni_simulated_device.models`."""
        return LAYOUTS[self.layout].model

    @property
    def deploy(self) -> str:
        """Name of the deploy YAML."""
        return LAYOUTS[self.layout].deploy

    @property
    def is_speech(self) -> bool:
        """Whether it is asked through the speech API."""
        return self.model == "qwen3_tts"

    @property
    def device(self) -> dict[str, Any]:
        """Settings of the simulated device."""
        least, most = self.lengths
        speech = {"qwen3_tts": {"min_frames": least, "max_frames": most}}
        chat = {"talker": {"frames_per_token": FRAMES_PER_TOKEN}}
        stages = {"*": {"pace": self.pace}, **(speech if self.is_speech else chat)}
        return {"preset": LAYOUTS[self.layout].preset, "stages": stages}

    @property
    def lengths(self) -> tuple[int, int]:
        """The least and the most tokens or frames of an answer."""
        tokens = self.tokens or TOKENS[self.kind]
        return max(1, round(tokens * (1 - self.vary))), round(tokens * (1 + self.vary))

    def count(self, level: float) -> int:
        """Requests at a level."""
        if self.requests is not None:
            return self.requests
        return OPEN_REQUESTS if self.loop == "open" else max(FEWEST, int(self.waves * level))

    def asked(self, what: str, count: int) -> list[Request]:
        """So many requests; they follow from *what* alone."""
        if self.is_speech:
            return [speech_request(f"Sentence {number} of {what}.") for number in range(count)]
        lengths = random.Random(f"lengths of {what}")
        modalities = ("text", "audio") if self.kind == "audio" else ("text",)
        return [
            chat_request(
                self._question(number, what),
                modalities=modalities,
                max_tokens=lengths.randint(*self.lengths),
                ignore_eos=True,
            )
            for number in range(count)
        ]

    def _question(self, number: int, what: str) -> str:
        text = f"Question {number} of {what}"
        return text if self.prompt is None else (text + " word" * self.prompt)[: self.prompt - _TEMPLATE_TOKENS]

    def starts_s(self, rate: float) -> list[float]:
        """When the requests of an open loop arrive, seconds of the wall clock from its beginning."""
        draws = random.Random(f"{rate:g} a second")
        return [0.0, *accumulate(self.pace * draws.expovariate(rate) for _ in range(self.count(rate) - 1))]

    def asked_at(self, level: float) -> list[Request]:
        """The requests of a level."""
        return self.asked(f"{level:g}", self.count(level))

    def run(self, url: str, level: float, late: list[float] | None = None) -> list[Capture]:
        """One level, on a server; *late* gets by how much the client was late, seconds."""
        requests = self.asked_at(level)
        if self.loop == "open":
            return run_open_loop(url, requests, self.starts_s(level), late)
        return run_closed_loop(url, requests, int(level), late)

    def limit(self, level: float) -> list[Capture]:
        """What the GPUs allow of a level, in the device's seconds."""
        loop = {"starts_s": self.starts_s(level)} if self.loop == "open" else {"streams": int(level)}
        return self.in_device_time(limit_of(self.asked_at(level), self.model, self.deploy, self.device, **loop))

    def in_device_time(self, captures: Sequence[Capture]) -> list[Capture]:
        """What `run` gave, in the device's seconds: those that passed over *pace*."""
        return [
            replace(
                each,
                started_at_s=each.started_at_s / self.pace,
                e2e_s=each.e2e_s / self.pace,
                pieces=[replace(piece, at_s=piece.at_s / self.pace) for piece in each.pieces],
            )
            for each in captures
        ]

    def __str__(self) -> str:
        """As a table's title has it."""
        loop = "open loop, Poisson arrivals" if self.loop == "open" else f"closed loop, {self.waves} waves"
        what = "codec frames" if self.is_speech else f"text tokens{' with audio' * (self.kind == 'audio')}"
        prompt = f", prompts of {self.prompt} tokens" if self.prompt else ""
        pace = f", at 1/{self.pace:g} of the device's pace" * (self.pace != 1)
        return f"{self.layout}, {loop}, answers of {self.lengths[0]} to {self.lengths[1]} {what}{prompt}{pace}"
