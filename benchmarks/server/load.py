"""What every start is asked, the same in every arm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from benchmarks.rigs.captures import run_closed_loop
from benchmarks.rigs.open_loop import run_open_loop
from benchmarks.rigs.whole_server import FEWEST, STEP_MS
from benchmarks.server.audio_in import AudioIn, with_audio
from omni_fastpath.tools.ab.capture import Capture, Request, chat_request, speech_request
from omni_simulated_device.config import StageSettings

Api = Literal["chat", "chat-whole", "speech"]
Model = Literal["qwen3_omni", "qwen3_tts"]
Loop = Literal["closed", "open"]
Arrivals = Literal["poisson", "even"]
Answers = Literal["long", "short"]

LEVELS = (1, 8, 32, 64, 128)
RATES = (4.0, 8.0)
WAVES = 4
OPEN_REQUESTS = 64
TTS_STEP_MS = 12.0
FRAMES_PER_TOKEN = 5.0
"""Codec frames of a long chat answer for each text token.

Issue #4561 shows 2,585 text tokens and 1,036 s of audio: 0.40 s for each token. A frame is 0.08 s.
"""

APIS: Mapping[Model, tuple[Api, ...]] = {"qwen3_omni": ("chat", "chat-whole"), "qwen3_tts": ("speech",)}
"""What 0.30 serves of each model; of an omni model's speech it says that the chat endpoint is for that."""
DEPLOYS: Mapping[tuple[Model, str], str] = {
    ("qwen3_omni", "1"): "qwen3_omni.yaml",
    ("qwen3_omni", "2"): "qwen3_omni_2x.yaml",
    ("qwen3_omni", "4"): "qwen3_omni_4x.yaml",
    ("qwen3_omni", "1:2:1"): "qwen3_omni_1-2-1.yaml",
    ("qwen3_omni", "1:3:1"): "qwen3_omni_1-3-1.yaml",
    ("qwen3_tts", "1"): "qwen3_tts_v2.yaml",
}
"""By model and replicas: of each stage, or of one stage after the other. Each replica has slots for 128 requests."""


@dataclass(frozen=True)
class Load:
    """What every start is asked.

    Attributes:
        levels: One after the other: streams in flight of a closed loop, requests a second of an open one.
        replicas: Of each stage, or of thinker, talker and code2wav: ``1:2:1``.
        tokens: Text tokens of an answer; of speech its codec frames.
        vary: Lengths lie evenly in ``tokens`` times (1 - vary) to (1 + vary), the same for every arm and start.
            With 0 all have one length, end together in a closed loop, and so their successors begin together.
        answers: Of chat. Long ones have ``FRAMES_PER_TOKEN``; short ones 40 to 120 frames, and not less than tokens.
        api: Chat streamed or not, or speech streamed as PCM.
        loop: Closed: the next request starts when one has ended; open: requests arrive whatever the server does.
        arrivals: Of an open loop: a Poisson process, the same for every arm and start, or evenly spaced.
        model: Which one.
        waves: Requests at a level of a closed loop, in blocks of its streams.
        requests: Requests at each level; None: by waves, and ``OPEN_REQUESTS`` of an open loop.
        audio_in: What requests bring; None: text alone.
        audio_every: One request in so many brings it, the first one too.
        talker_us: By how much each request of its batch lengthens a talker's step, microseconds.

    Raises:
        ValueError: Upstream does not serve that API of that model, there is no such deployment, *vary* is no share, or
            speech is to bring audio.
    """

    levels: Sequence[float] = LEVELS
    replicas: str = "1"
    tokens: int = 100
    vary: float = 0.0
    answers: Answers = "long"
    api: Api = "chat"
    loop: Loop = "closed"
    arrivals: Arrivals = "poisson"
    model: Model = "qwen3_omni"
    waves: int = WAVES
    requests: int | None = None
    audio_in: AudioIn | None = None
    audio_every: int = 4
    talker_us: float = StageSettings().per_req_us

    def __post_init__(self) -> None:
        if not 0 <= self.vary < 1:
            raise ValueError(f"vary: found {self.vary:g}, allowed: 0 to less than 1")
        if self.api not in APIS[self.model]:
            allowed, served = ", ".join(APIS[self.model]), ", ".join(model for model in APIS if self.api in APIS[model])
            raise ValueError(
                f"api: found {self.api}, which vLLM-Omni serves of {served} and not of {self.model}; allowed: {allowed}"
            )
        if self.audio_in is not None and (self.api == "speech" or self.audio_every < 1):
            found = f"{self.audio_in} with one {self.api} request in {self.audio_every}"
            raise ValueError(f"audio_in: found {found}, allowed: with chat requests, one in 1 or more")
        if (self.model, self.replicas) not in DEPLOYS:
            allowed = ", ".join(replicas for model, replicas in DEPLOYS if model == self.model)
            raise ValueError(f"replicas: found {self.replicas}, allowed for {self.model}: {allowed}")

    @property
    def deploy(self) -> str:
        """Name of the deploy YAML."""
        return DEPLOYS[self.model, self.replicas]

    @property
    def stages(self) -> dict[str, dict[str, float]]:
        """Settings of the simulated device."""
        if self.model == "qwen3_tts":
            least, most = self.lengths
            frames = {"min_frames": least, "max_frames": most}
            talker = {"base_ms": TTS_STEP_MS, "per_req_us": self.talker_us, **frames}
            return {"qwen3_tts": talker, "code2wav": {"base_ms": STEP_MS["code2wav"]}}
        found = {stage: {"base_ms": step} for stage, step in STEP_MS.items()}
        found["talker"]["per_req_us"] = self.talker_us
        if self.answers == "long":
            found["talker"]["frames_per_token"] = FRAMES_PER_TOKEN
        return found

    @property
    def lengths(self) -> tuple[int, int]:
        """The least and the most tokens or frames of an answer."""
        return max(1, round(self.tokens * (1 - self.vary))), round(self.tokens * (1 + self.vary))

    @property
    def streamed(self) -> bool:
        """Whether answers come piece by piece."""
        return self.api != "chat-whole"

    def count(self, level: float) -> int:
        """Requests at a level."""
        if self.requests is not None:
            return self.requests
        return OPEN_REQUESTS if self.loop == "open" else max(FEWEST, int(self.waves * level))

    def first_wave(self, level: float) -> int:
        """How many of a level's requests start at once; of an open loop none is told from the others."""
        return 0 if self.loop == "open" else min(int(level), self.count(level))

    def asked(self, what: str, count: int) -> list[Request]:
        """So many requests; they follow from *what* alone."""
        if self.api == "speech":
            return [speech_request(f"Sentence {number} of {what}.") for number in range(count)]
        lengths = random.Random(f"lengths of {what}")
        names = [f"Question {number} of {what}" for number in range(count)]
        asked = [
            chat_request(name, max_tokens=lengths.randint(*self.lengths), ignore_eos=True, stream=self.streamed)
            for name in names
        ]
        if self.audio_in is not None:
            for number in range(0, count, self.audio_every):
                asked[number] = with_audio(asked[number], self.audio_in, names[number])
        return asked

    def starts_s(self, rate: float) -> list[float]:
        """When the requests of an open loop arrive, seconds from its beginning."""
        count = self.count(rate)
        if self.arrivals == "even":
            return [number / rate for number in range(count)]
        draws = random.Random(f"{rate:g} a second")
        return [0.0, *accumulate(draws.expovariate(rate) for _ in range(count - 1))]

    def asked_at(self, level: float) -> list[Request]:
        """The requests of a level."""
        return self.asked(f"{level:g}", self.count(level))

    def run(self, url: str, level: float) -> list[Capture]:
        """One level, on a server."""
        requests = self.asked_at(level)
        if self.loop == "open":
            return run_open_loop(url, requests, self.starts_s(level))
        return run_closed_loop(url, requests, int(level))

    def __str__(self) -> str:
        """As a table's title has it."""
        loop = f"open loop, {self.arrivals} arrivals" if self.loop == "open" else "closed loop"
        tokens = "{} to {}".format(*self.lengths) if self.vary else str(self.tokens)
        length = f"{tokens} codec frames" if self.api == "speech" else f"{self.answers} answers of {tokens} text tokens"
        if self.audio_in:
            length += f", {self.audio_in} in with 1 request of {self.audio_every}, TTFP and gaps of the others"
        replicas = f"{self.replicas} {'replicas' if ':' in self.replicas else 'of each stage'}"
        return f"{self.model}, {self.api}, {loop}, {replicas}, {length}"
